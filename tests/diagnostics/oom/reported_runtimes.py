# ruff: noqa: E501  (messages stand as programs print them)
"""Kinds of output of other runtimes, boosters, decoders, services and operating systems, and of places in libraries.

The amounts and names are made up.
"""

from diagnostics.oom.reported import Reported, cuda  # type: ignore[import-not-found]

FULL = cuda("192.00 MiB", "39.39 GiB", "101.06 MiB", "39.28 GiB", "38.51 GiB", "274.11 MiB")

REPORTED = [
    Reported(
        "NVML's assertion on a slice",
        "true-need",
        'lowtide.fit(model, step, batch, budget="90%")',
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/conda/conda-bld/pytorch_1695392020201/work/c10/cuda/CUDACachingAllocator.cpp":1154, please report a bug to PyTorch.',
    ),
    Reported(
        "cudaMallocAsync beside another process",
        "other-process",
        "check nvidia-smi on",
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 4.02 GiB\nRequested               : 80.00 MiB\nDevice limit            : 23.99 GiB\nFree (according to CUDA): 12.25 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        never="the step needs more",
    ),
    Reported(
        "a generator of random numbers",
        "not-pytorch",
        "check nvidia-smi for",
        "RuntimeError: CURAND error: CURAND_STATUS_ALLOCATION_FAILED",
    ),
    Reported(
        "TensorFlow's pool on ROCm",
        "other-process",
        "check rocm-smi --showpids",
        "E tensorflow/compiler/xla/stream_executor/rocm/rocm_driver.cc:606] failed to allocate 12.99GiB (13947295296 bytes) from device: HIP_ERROR_OutOfMemory",
        never="nvidia-smi",
    ),
    Reported(
        "all temporaries of a compiled function of JAX",
        "true-need",
        "smaller batches, shorter",
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 38.27GiB.",
    ),
    Reported(
        "a kernel of Inductor that fits nowhere",
        "cap",
        "smaller block sizes or",
        "torch._inductor.exc.InductorError: RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: triton_poi_fused_0 Required: 163840 Hardware limit:101376 Reducing block sizes or `num_stages` may help.",
    ),
    Reported(
        "NCCL's file in shared memory",
        "cap",
        "start the container with",
        "node1:88:120 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-9nXvBc to 33030532 bytes, error: No space left on device (28)",
    ),
    Reported(
        "llama.cpp's KV cache",
        "true-need",
        "fewer layers on the",
        "llama_kv_cache_init: failed to allocate buffer for kv cache\nllama_new_context_with_model: llama_kv_cache_init() failed for self-attention cache",
    ),
    Reported(
        "ONNX Runtime on the host",
        "host-memory",
        "fewer DataLoader workers, a",
        "onnxruntime::python Exception: [ONNXRuntimeError] : 1 : FAIL : bad allocation",
    ),
    Reported(
        "a tactic of TensorRT",
        "cap",
        "do nothing if the engine",
        "[TRT] [W] Tactic Device request: 4672MB Available: 4096MB. Device memory is insufficient to use tactic.",
        certain=False,
    ),
    Reported(
        "attention of the web UI",
        "huge-tensor",
        "--xformers or --opt-sdp-attention: attention",
        "File \"C:\\stable-diffusion-webui\\modules\\sd_hijack_optimizations.py\", line 63, in split_cross_attention_forward\n    s1 = einsum('b i d, b j d -> b i j', q[:, i:end], k)\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB (GPU 0; 8.00 GiB total capacity; 3.88 GiB already allocated; 1.88 GiB free; 3.91 GiB reserved in total by PyTorch)",
        never="fit\\(",
    ),
    Reported("Java's metaspace", "cap", "raise it: -XX:MaxMetaspaceSize, or", "java.lang.OutOfMemoryError: Metaspace"),
    Reported(
        "Java's direct buffers",
        "cap",
        "raise it: -XX:MaxMetaspaceSize, or",
        "java.lang.OutOfMemoryError: Direct buffer memory",
    ),
    Reported(
        "Java's threads",
        "cap",
        "fewer threads: OMP_NUM_THREADS=1 and",
        "java.lang.OutOfMemoryError: unable to create new native thread",
    ),
    Reported(
        "Slurm's limit on virtual memory",
        "host-memory",
        "request more: sbatch",
        "slurmstepd: error: Job 98 exceeded virtual memory limit (41231512 > 16777216), being killed",
    ),
    Reported(
        "macOS' kernel",
        "host-memory",
        "look in Activity Monitor",
        "kernel: memorystatus: killing_top_process pid 4711 [Python] (vm-compressor-space-shortage) 1 - memorystatus_available_pages: 12031",
    ),
    Reported(
        "macOS' swap",
        "host-memory",
        "look in Activity Monitor",
        "(kernel) low swap: killing largest compressed process with pid 4711 (python3.11) and size 42000 MB",
    ),
    Reported(
        "macOS' window", "host-memory", "look in Activity Monitor", "Your system has run out of application memory."
    ),
    Reported(
        "NumPy 1.16",
        "host-memory",
        "fewer DataLoader workers, a",
        "MemoryError: Unable to allocate array with shape (60000, 784) and data type float64",
    ),
    Reported(
        "a parser of pandas",
        "host-memory",
        "check free -h, ulimit",
        "pandas._libs.parsers.TextReader._tokenize_rows\npandas.errors.ParserError: Error tokenizing data. C error: out of memory",
    ),
    Reported(
        "shared memory that cannot be had",
        "cap",
        "start the container with",
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_12_1>: Success (0)",
    ),
    Reported(
        "workers of nnU-Net",
        "host-memory",
        "fewer workers (num_proc, n_jobs",
        "RuntimeError: One or more background workers are no longer alive. Exiting. Please check the print statements above for the actual error message",
        certain=False,
    ),
    Reported(
        "a worker of batchgenerators",
        "host-memory",
        "fewer workers (num_proc, n_jobs",
        "RuntimeError: Some background worker is 6 feet under. Yuck. \nOK jokes aside.\nOne of your background processes is missing. This could be because of an error (look for an error message) or because it was killed by your OS due to running out of RAM.",
        certain=False,
    ),
    Reported(
        "Node.js",
        "cap",
        "a larger heap: NODE_OPTIONS=--max-old-space-size=8192",
        "FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory",
    ),
    Reported(
        "a worker of Node.js",
        "cap",
        "a larger heap: NODE_OPTIONS=--max-old-space-size=8192",
        "Error [ERR_WORKER_OUT_OF_MEMORY]: Worker terminated due to reaching memory limit: JS heap out of memory",
    ),
    Reported("a program in Go", "host-memory", "check free -h, ulimit", "fatal error: runtime: out of memory"),
    Reported("R", "host-memory", "check free -h, ulimit", "Error: cannot allocate vector of size 14.9 Gb"),
    Reported(
        "MATLAB",
        "not-pytorch",
        "gpuDevice shows the free",
        "Out of memory on device. To view more detail about available memory on the GPU, use 'gpuDevice()'.",
    ),
    Reported(
        "XGBoost 2",
        "not-pytorch",
        "check nvidia-smi for",
        "xgboost.core.XGBoostError: [10:11:12] /workspace/src/common/device_helpers.cu:32: Memory allocation error on worker 0: std::bad_alloc: cudaErrorMemoryAllocation: out of memory\n- Free memory: 12.1GB\n- Requested memory: 30.2GB",
    ),
    Reported(
        "LightGBM on a GPU",
        "not-pytorch",
        "check nvidia-smi for",
        "[LightGBM] [Fatal] [CUDA] out of memory /x/src/cuda/cuda_utils.cpp 40",
    ),
    Reported(
        "Faiss",
        "not-pytorch",
        "one StandardGpuResources for all",
        "RuntimeError: Error in virtual void* faiss::gpu::StandardGpuResourcesImpl::allocMemory(const faiss::gpu::AllocRequest&) at StandardGpuResources.cpp:452: Error: 'err == cudaSuccess' failed: StandardGpuResources: alloc fail type TemporaryMemoryOverflow dev 0 space Device stream 0x7f size 1610612736 bytes (cudaMalloc error out of memory [2])",
    ),
    Reported(
        "DuckDB",
        "cap",
        "SET memory_limit, SET threads",
        "duckdb.duckdb.OutOfMemoryException: Out of Memory Error: failed to allocate data of size 512.0 KiB (12.7 GiB/12.7 GiB used)",
    ),
    Reported(
        "more than the GPU has, on Windows",
        "true-need",
        'lowtide.fit(model, step, batch, budget="7.6GiB")',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free. Of the allocated memory 13.98 GiB is allocated by PyTorch, and 129.48 MiB is reserved by PyTorch but unallocated.",
        never='budget="1[0-9]',
    ),
    Reported(
        "DeepSpeed's partitions on the host",
        "host-memory",
        "fewer DataLoader workers, a",
        'Traceback (most recent call last):\n  File "/x/site-packages/deepspeed/runtime/zero/stage3.py", line 350, in __init__\n    self._setup_for_real_optimizer()\n  File "/x/site-packages/deepspeed/runtime/zero/stage3.py", line 432, in _create_fp32_partitions\n    self.fp32_partitioned_groups_flat.append(torch.empty(...))\nRuntimeError: [enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 27179869184 bytes. Error code 12 (Cannot allocate memory)',
        never="logits over",
    ),
    Reported(
        "CatBoost's pool",
        "not-pytorch",
        "check nvidia-smi for",
        '(NCudaLib::TOutOfMemoryError) /src/catboost/catboost/cuda/cuda_lib/memory_pool/stack_like_memory_pool.h:303: Error: Out of memory. Requested 8880 MB; Free 5902.061425 MB\nuncaught exception:\n    address -> 0x4d5a35b0410\n    what() -> "/src/catboost/catboost/cuda/cuda_lib/memory_pool/stack_like_memory_pool.h:303: Error: Out of memory. Requested 8880 MB; Free 5902.061425 MB"',
    ),
    Reported(
        "DALI's decoder",
        "not-pytorch",
        "fewer num_threads, a smaller",
        "RuntimeError: Critical error in pipeline:\nError when executing Mixed operator ImageDecoder encountered:\nCan't allocate 129499136 bytes on device 0.\nCurrent pipeline object is no longer valid.",
    ),
    Reported(
        "DALI's decoder, without a number",
        "not-pytorch",
        "fewer num_threads, a smaller",
        "RuntimeError: Critical error in pipeline:\nError when executing Mixed operator ImageDecoder encountered:\nCUDA allocation failed\nCurrent pipeline object is no longer valid.",
    ),
    Reported(
        "nvJPEG",
        "not-pytorch",
        "fewer num_threads, a smaller",
        'Error in thread 0: [/opt/dali/dali/operators/decoder/nvjpeg/nvjpeg_decoder.h:355] NVJPEG error "5" : NVJPEG_STATUS_ALLOCATOR_FAILURE n02130308/ILSVRC2012_val_00033687.JPEG',
    ),
    Reported(
        "OpenVINO",
        "cap",
        "a smaller batch or",
        "[GPU] Exceeded max size of memory object allocation: requested 7516192768 bytes, but max alloc size supported by device is 4294959104 bytes. Please try to reduce batch size, use lower precision.",
    ),
    Reported(
        "llama.cpp by SYCL", "true-need", "fewer layers on the", "can't allocate 3456106496 Bytes of memory on device"
    ),
    Reported(
        "a Jetson",
        "true-need",
        "free memory: stop the",
        "NvMapMemAllocInternalTagged: 1075072515 error 12\nNvMapMemHandleAlloc: error 0",
    ),
    Reported(
        "Darknet",
        "not-pytorch",
        "check nvidia-smi for",
        "CUDA Error: out of memory\ndarknet: ./src/cuda.c:36: check_error: Assertion `0' failed.",
    ),
    Reported(
        "Caffe",
        "not-pytorch",
        "check nvidia-smi for",
        "F0712 11:11:11.111 12 syncedmem.cpp:71] Check failed: error == cudaSuccess (2 vs. 0)  out of memory",
    ),
    Reported(
        "DGL",
        "not-pytorch",
        "check nvidia-smi for",
        "dgl._ffi.base.DGLError: [10:10:10] /opt/dgl/src/runtime/cuda/cuda_device_api.cc:97: Check failed: e == cudaSuccess || e == cudaErrorCudartUnloading: CUDA: out of memory",
    ),
    Reported(
        "the driver, with a capital",
        "not-pytorch",
        "check nvidia-smi for",
        "CUDA error: Out of memory in cuMemAlloc_v2(&device_pointer, size)",
    ),
    Reported(
        "the kernel's reaper",
        "host-memory",
        "look in dmesg for the process",
        "oom_reaper: reaped process 4711 (python3), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
    ),
    Reported(
        "Windows' event log",
        "host-memory",
        "enlarge the paging file",
        "Windows successfully diagnosed a low virtual memory condition. The following programs consumed the most virtual memory: python.exe (12345) consumed 98765432100 bytes",
    ),
    Reported(
        "Windows' exit code",
        "host-memory",
        "enlarge the paging file",
        "Process finished with exit code -1073741801 (0xC0000017)",
    ),
    Reported(
        "Render",
        "host-memory",
        "a larger memory size",
        "Instance failed: zxc12\nRan out of memory (used over 512MB) while running your code.",
    ),
    Reported("Fly.io", "host-memory", "a larger memory size", "Process appears to have been OOM killed!"),
    Reported("Streamlit", "host-memory", "a larger memory size", "This app has gone over its resource limits."),
    Reported(
        "PBS' control group",
        "host-memory",
        "request more: qsub",
        "Job 1234.pbs exceeded its memory allocation: cgroup mem limit reached",
    ),
    Reported(
        "FSDP that takes a module whole",
        "loading",
        "FSDP moves a whole module",
        '  File "/x/site-packages/torch/distributed/fsdp/fully_sharded_data_parallel.py", line 391, in __init__\n    _auto_wrap(auto_wrap_kwargs, fsdp_kwargs, FullyShardedDataParallel)\n  File "/x/site-packages/torch/distributed/fsdp/_init_utils.py", line 600, in _init_param_handle_from_module\n    _move_module_to_device(\n  File "/x/site-packages/torch/distributed/fsdp/_init_utils.py", line 1000, in _move_module_to_device\n    param.data = param.to(device_from_device_id)\n'
        + FULL,
        never="if the first steps ran",
    ),
    Reported(
        "an optimizer of torchao",
        "optimizer-first-step",
        "less state: 8-bit",
        '  File "/x/site-packages/torchao/optim/adam.py", line 80, in _new_buffer\n    out = self._subclass_zeros(local_p, signed, self.block_size)\n'
        + FULL,
    ),
    Reported(
        "an optimizer of bitsandbytes",
        "optimizer-first-step",
        "less state: 8-bit",
        '  File "/x/site-packages/bitsandbytes/optim/optimizer.py", line 279, in step\n    self.init_state(group, p, gindex, pindex)\n  File "/x/site-packages/bitsandbytes/optim/optimizer.py", line 440, in init_state\n    state["state1"] = self.get_state_buffer(p, dtype=torch.uint8)\n'
        + FULL,
    ),
    Reported(
        "an image of a VAE",
        "true-need",
        "pipe.enable_model_cpu_offload() and pipe.vae.enable_tiling(); load weights in",
        '  File "/x/site-packages/diffusers/models/autoencoders/autoencoder_kl.py", line 320, in decode\n    decoded = self._decode(z).sample\n'
        + FULL,
        never="fit\\(",
    ),
    Reported(
        "Whisper",
        "true-need",
        "smaller or fewer inputs",
        '  File "/x/site-packages/whisper/transcribe.py", line 300, in transcribe\n    result: DecodingResult = decode_with_fallback(mel_segment)\n'
        + FULL,
        never="fit\\(",
    ),
    Reported(
        "a predictor of Ultralytics",
        "true-need",
        "smaller or fewer inputs",
        '  File "/x/site-packages/ultralytics/engine/predictor.py", line 250, in stream_inference\n    preds = self.inference(im, *args, **kwargs)\n'
        + FULL,
        never="fit\\(",
    ),
    Reported(
        "sentences that are encoded",
        "true-need",
        "smaller or fewer inputs",
        '  File "/x/site-packages/sentence_transformers/SentenceTransformer.py", line 600, in encode\n    out_features = self.forward(features, **kwargs)\n'
        + FULL,
        never="fit\\(",
    ),
    Reported(
        "warmup of transformers' loader",
        "loading",
        "weights in a smaller",
        'Traceback (most recent call last):\n  File "/x/site-packages/transformers/modeling_utils.py", line 9, in from_pretrained\n    x\n  File "/x/site-packages/transformers/modeling_utils.py", line 9, in caching_allocator_warmup\n    _ = torch.empty(byte_count // factor, dtype=torch.float16, device=device)\n'
        + FULL,
        never="fit\\(",
    ),
    Reported(
        "weights quantized while loaded",
        "loading",
        "weights in a smaller",
        'Traceback (most recent call last):\n  File "/x/site-packages/transformers/modeling_utils.py", line 9, in from_pretrained\n    x\n  File "/x/site-packages/bitsandbytes/functional.py", line 9, in quantize_4bit\n    out = torch.zeros(\n'
        + FULL,
        never="fit\\(",
    ),
    Reported(
        "optimizer state of Lightning",
        "loading",
        'torch.load(path, map_location="cpu"), then load_state_dict',
        'Traceback (most recent call last):\n  File "/x/site-packages/lightning/pytorch/trainer/connectors/checkpoint_connector.py", line 9, in restore_optimizers\n    x\n  File "/x/site-packages/torch/optim/optimizer.py", line 9, in _process_value_according_to_param_policy\n    return value.to(dtype=param.dtype, device=param.device)\n'
        + FULL,
    ),
    Reported(
        "a file of safetensors onto the GPU",
        "loading",
        'load_file(path, device="cpu"), then load_state_dict',
        'Traceback (most recent call last):\n  File "/a/main.py", line 9, in <module>\n    sd = load_file(p, device=\'cuda\')\n  File "/x/site-packages/safetensors/torch.py", line 9, in load_file\n    result[k] = f.get_tensor(k)\n'
        + FULL,
    ),
    Reported(
        "one tensor above a fraction",
        "cap",
        "raise the limit if it is",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.62 GiB. GPU 0 has a total capacity of 15.35 GiB of which 15.23 GiB is free. Including non-PyTorch memory, this process has 124.02 MiB memory in use. 4.61 GiB allowed; Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
        never="fit\\(",
    ),
    Reported(
        "memory of HIP's own",
        "not-pytorch",
        "check rocm-smi --showpids",
        "rocBLAS error: hipMalloc failed: out of memory",
        never="nvidia-smi",
    ),
    Reported(
        "a tensor in pinned memory",
        "pinned-memory",
        "pin less memory at once",
        'Traceback (most recent call last):\n  File "/a/train.py", line 3, in <module>\n    buffer = torch.empty(1 << 34, pin_memory=True)\nRuntimeError: CUDA error: out of memory',
    ),
    Reported(
        "pinned memory, by the driver's name",
        "pinned-memory",
        "pin less memory at once",
        "RuntimeError: CUDA error: out of memory (cudaHostAlloc)",
    ),
    Reported(
        "MXNet's pool",
        "true-need",
        "smaller batches",
        "mxnet.base.MXNetError: [10:00:00] src/storage/./pooled_storage_manager.h:161: cudaMalloc retry failed: out of memory",
        never="fit\\(|torch",
    ),
    Reported(
        "a buffer of Tenstorrent",
        "true-need",
        "smaller batches or shorter rows",
        "TT_FATAL: Out of Memory: Not enough space to allocate 67108864 B DRAM buffer across 12 banks",
        never="nvidia-smi|fit\\(",
    ),
    Reported(
        "weights of transformers, in a log that begins below from_pretrained",
        "loading",
        "",
        'Traceback (most recent call last):\n  File "/x/transformers/modeling_utils.py", line 49, in _load_pretrained_model\n    param = param[...]\n'
        + cuda("250.00 MiB", "23.68 GiB", "190.00 MiB", "23.48 GiB", "23.20 GiB", "1.20 MiB"),
        never="fit\\(|the step needs",
    ),
    Reported(
        "scores larger than what is free, beside no other process",
        "huge-tensor",
        "find the operation that allocates it at model.py:71",
        'Traceback (most recent call last):\n  File "model.py", line 71, in forward\n    scores = q @ k.mT\n'
        + cuda("64.00 GiB", "79.15 GiB", "61.50 GiB", "17.64 GiB", "16.90 GiB", "200.00 MiB"),
        never="other processes|expandable",
    ),
    Reported(
        "state in a DeepSpeed optimizer on the host",
        "optimizer-first-step",
        "less state",
        '  File "/x/deepspeed/ops/adam/cpu_adam.py", line 140, in step\n    state["exp_avg"] = torch.zeros_like(p.data)\n'
        "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 11102298112 bytes. Error code 12 (Cannot allocate memory)",
        says="main memory",
        never="nvidia-smi",
    ),
]
