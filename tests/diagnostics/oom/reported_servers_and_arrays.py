# ruff: noqa: E501  (messages stand as programs print them)
"""Kinds of output of servers, arrays on the host, compiled programs and messages that have other causes as well.

The amounts and names are made up.
"""

from diagnostics.oom.reported import Reported  # type: ignore[import-not-found]

REPORTED = [
    Reported(
        "vLLM's start, with the name of the device",
        "other-process",
        "nvidia-smi",
        "ValueError: Free memory on device cuda:0 (9.73/23.52 GiB) on startup is less than desired GPU memory utilization (0.9, 21.17 GiB).",
        says=r"23\.5 GiB  capacity\n +9\.73 GiB  free",
    ),
    Reported(
        "vLLM's profiling beside a process that ends",
        "other-process",
        "start the engine again",
        "AssertionError: Error in memory profiling. Initial free memory 22.03 GiB, current free memory 22.84 GiB. This happens when other processes sharing the same container release GPU memory while vLLM is profiling during initialization.",
        says="gave memory back",
        never="less of the GPU is free",
    ),
    Reported(
        "one buffer of Vulkan, by the size of buffers",
        "cap",
        "smaller buffers",
        "ggml_vulkan: Device memory allocation of size 1073741824 failed.\n"
        "ggml_vulkan: Requested buffer size exceeds device buffer size limit: ErrorOutOfDeviceMemory\n"
        "llama_model_load: error loading model: unable to allocate Vulkan0 buffer",
        never="no memory left",
    ),
    Reported(
        "a shared mapping on Windows",
        "host-memory",
        "paging file",
        "RuntimeError: Couldn't open shared file mapping: <torch_14440_1723112230_6>, error code: <1455>",
    ),
    Reported(
        "Windows' resources",
        "host-memory",
        "paging file",
        "OSError: [WinError 1450] Insufficient system resources exist to complete the requested service",
        says="1450",
    ),
    Reported(
        "a kernel of bitsandbytes",
        "not-pytorch",
        "nvidia-smi",
        r"Error out of memory at line 88 in file D:\a\bitsandbytes-windows-webui\csrc\ops.cu",
        never="paged|WSL",
    ),
    Reported(
        "paged memory of bitsandbytes",
        "not-pytorch",
        "WSL",
        "Error out of memory at line 380 in file /mmfs1/home/u/git/bitsandbytes/csrc/pythonInterface.c",
        says="paged",
    ),
    Reported(
        "weights on a disk",
        "loading",
        "free the GPU first",
        "ValueError: The current `device_map` had weights offloaded to the disk. Please provide an `offload_folder` for them.",
        says="offload_folder=",
    ),
    Reported(
        "a worker of a model server",
        "true-need",
        "fewer inputs at a time",
        "[INFO ] W-9000-m_1.0-stdout MODEL_LOG - torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 108.00 MiB (GPU 0; 14.76 GiB total capacity; 13.50 GiB already allocated; 35.75 MiB free; 13.65 GiB reserved in total by PyTorch)",
        never=r"fit\(|the step",
    ),
    Reported(
        "a program for a TPU",
        "true-need",
        "smaller batches",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 19.64G of 15.75G hbm. Exceeded hbm capacity by 3.89G.",
        says=r"program needs 19\.6 GiB, and the device has 15\.8 GiB[\s\S]*needed by the program",
        never="tensors|its driver",
    ),
    Reported(
        "scratch memory of a TPU",
        "cap",
        "smaller blocks",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. It should not be possible to run out of vmem - please file a bug against XLA. Used 18.2M of 16.0M vmem.",
        says="HBM is not full",
        never="smaller batches|the step needs",
    ),
    Reported(
        "the limit of a kernel of a TPU",
        "cap",
        "smaller blocks",
        "Mosaic failed to compile TPU kernel: Scoped allocation with size 17.16M and limit 16.00M exceeded scoped vmem limit by 1.16M.",
    ),
    Reported(
        "cuDNN beside JAX's pool",
        "other-process",
        "nvidia-smi",
        "E external/local_xla/xla/stream_executor/cuda/cuda_dnn.cc:535] Could not create cudnn handle: CUDNN_STATUS_INTERNAL_ERROR\n"
        "jaxlib.xla_extension.XlaRuntimeError: FAILED_PRECONDITION: DNN library initialization failed.",
        says="XLA_PYTHON_CLIENT_PREALLOCATE",
        certain=False,
    ),
    Reported(
        "a cuBLAS handle, or an index out of range",
        "not-pytorch",
        "nvidia-smi",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        says=r"other causes, too[\s\S]*2\. if the device has room, run the step on the CPU",
        certain=False,
    ),
    Reported(
        "resources of HSA, with memory free",
        "driver",
        "look for a limit",
        "Callback: Queue 0x7f12 aborting with error : HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. Available Free mem : 14021 MB Code: 0x1008",
        says=r"13\.7 GiB of memory are free",
        never="nvidia|no memory left",
    ),
    Reported(
        "resources of HSA, with none free",
        "not-pytorch",
        "rocm-smi",
        "Callback: Queue 0x7f12 aborting with error : HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. Available Free mem : 12 MB Code: 0x1008",
        says="with 12 MiB free",
        never="nvidia|without numbers",
    ),
    Reported(
        "images of a whole data set",
        "huge-tensor",
        "do not load all 60000 images",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 33.6 GiB for an array with shape (60000, 224, 224, 3) and data type float32",
        says="uint8",
        never="broadcast|logits",
    ),
    Reported(
        "a join whose keys repeat",
        "huge-tensor",
        "a join whose keys repeat",
        "numpy.core._exceptions.MemoryError: Unable to allocate 91.3 GiB for an array with shape (12254310412,) and data type int64",
        never="broadcast",
    ),
    Reported(
        "a sparse matrix made dense",
        "huge-tensor",
        "toarray",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 45.2 GiB for an array with shape (50000, 121392) and data type float64",
    ),
    Reported(
        "workers of joblib that were killed",
        "host-memory",
        "n_jobs",
        "TerminatedWorkerError: A worker process managed by the executor was unexpectedly terminated. This could be caused by a segmentation fault while calling the function or by an excessive memory usage causing the Operating System to kill the worker.\n\n"
        "The exit codes of the workers are {SIGKILL(-9), SIGABRT(-6)}",
        certain=False,
    ),
    Reported(
        "Spark's driver in a notebook",
        "host-memory",
        "collect less",
        "The spark driver has stopped unexpectedly and is restarting. Your notebook will be automatically reattached.",
        certain=False,
    ),
    Reported(
        "an APU of AMD, whose driver states a free amount above its capacity",
        "huge-tensor",
        "tiled VAE",
        "comfyui-rocm  | !!! Exception during processing!!! HIP out of memory. Tried to allocate 264.00 MiB. GPU 0 has a total capacty of 512.00 MiB of which 17179869183.96 GiB is free. Of the allocated memory 251.70 MiB is allocated by PyTorch, and 21.30 MiB is reserved by PyTorch but unallocated.",
        never="PiB|free\n|fit\\(",
    ),
    Reported(
        "unused blocks on Windows with ROCm, beside a little that is not attributed",
        "fragmentation",
        "garbage_collection_threshold",
        "!!! Exception during processing !!! HIP out of memory. Tried to allocate 8.12 GiB. GPU 0 has a total capacity of 15.92 GiB of which 0 bytes is free. Of the allocated memory 3.80 GiB is allocated by PyTorch, and 9.31 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        never="cannot see|expandable_segments",
    ),
    Reported(
        "memory outside PyTorch in vLLM's workers",
        "not-pytorch",
        "max_num_seqs",
        "(VllmWorker rank=1 pid=2978) ERROR 03-19 07:27:53 [multiproc_executor.py:375] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.70 GiB. GPU 1 has a total capacity of 23.57 GiB of which 611.88 MiB is free. Process 133288 has 22.96 GiB memory in use. Of the allocated memory 20.30 GiB is allocated by PyTorch, with 112.00 MiB allocated in private pools (e.g., CUDA Graphs), and 179.98 MiB is reserved by PyTorch but unallocated.",
        never="set_per_process_memory_fraction|fit\\(",
    ),
    Reported(
        "a worker of vLLM without a rank",
        "true-need",
        "max_num_seqs",
        "(Worker pid=2263) ERROR 10-25 13:12:42 [multiproc_executor.py:671] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 784.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 402.94 MiB is free. Including non-PyTorch memory, this process has 78.78 GiB memory in use. Of the allocated memory 77.30 GiB is allocated by PyTorch, and 102.60 MiB is reserved by PyTorch but unallocated.",
        never="fit\\(",
    ),
    Reported(
        "Ollama's runner, which cannot load",
        "true-need",
        "a smaller num_ctx",
        "Error: llama runner process has terminated: error loading model: unable to allocate CUDA2 buffer",
        never="-ngl|--tensor-split",
    ),
    Reported(
        "Ollama's service in the system's log",
        "true-need",
        "a smaller num_ctx",
        "Apr 17 01:25:10 host ollama[56169]: ggml_backend_cuda_buffer_type_alloc_buffer: allocating 23981.03 MiB on device 0: cudaMalloc failed: out of memory\n"
        "Apr 17 01:25:11 host ollama[56169]: llama_model_load: error loading model: unable to allocate backend buffer",
        never="-ngl|--tensor-split",
    ),
    Reported(
        "Ollama's runner on the host",
        "host-memory",
        "num_ctx",
        "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 437944320\n"
        "llama_model_load: error loading model: unable to allocate CPU buffer\n"
        "goroutine 40 [running]:\n"
        "github.com/ollama/ollama/runner/llamarunner.(*Server).loadModel(0xc00009be00, {0x31, 0x0})",
        never="-ngl|--no-mmap",
    ),
    Reported(
        "pinned memory of llama.cpp with Vulkan",
        "pinned-memory",
        "locked memory",
        "ggml_vulkan: Failed to allocate pinned memory.\nggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        never="fewer layers",
    ),
    *(
        Reported(
            f"a bus error, by {text[:20]}", "cap", "--ipc=host", text, certain=False, says="/dev/shm", never="fit\\("
        )
        for text in (
            "[ERROR] [launch.py:321:sigkill_handler] ['/opt/conda/bin/python', '-u', 'train.py', '--local_rank=3'] exits with return code = -7",
            "  exitcode  : -7 (pid: 4711)\n  traceback : Signal 7 (SIGBUS) received by PID 4711",
            "Command terminated with exit code 135",
        )
    ),
]
