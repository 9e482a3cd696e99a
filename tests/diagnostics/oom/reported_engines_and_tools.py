# ruff: noqa: E501, RUF001  (messages stand as programs print them)
"""Kinds of output of inference engines, compilers, disks, schedulers and drivers, and of messages in Chinese.

The amounts and names are made up.
"""

from diagnostics.oom.reported import Reported  # type: ignore[import-not-found]

FAIRSEQ = "2020-11-06 22:55:35 | WARNING | fairseq.trainer | "

REPORTED = [
    # --- engines that run models
    Reported(
        "an arena of ds4 on an APU",
        "true-need",
        "--ssd-streaming",
        "ROCm preparing model tensor mappings: 80.45 GiB\n"
        "ds4: ROCm model arena alloc failed for tensor-span:128 (1792.00 MiB chunk): out of memory",
        says="GTT|carve-out",
        never=r"nvidia|fit\(|PyTorch",
    ),
    Reported(
        "tensors of ds4",
        "true-need",
        "--ssd-streaming",
        "ds4-bench: context buffers 1164.22 MiB (ctx=16417, backend=rocm, prefill_chunk=8192)\n"
        "ds4: ROCm tensor alloc failed: out of memory\nds4-bench: failed to create session",
        says="context",
        never=r"nvidia|fit\(",
    ),
    Reported(
        "FlashInfer's workspace",
        "cap",
        "WORKSPACE",
        "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 435814400 and alignment 16 in "
        "AlignedAllocator",
        says="workspace",
        never=r"fit\(|true-need",
    ),
    Reported(
        "FlashInfer's workspace, in newer words",
        "cap",
        "WORKSPACE",
        "RuntimeError: Buffer overflow when allocating memory for batch_prefill_tmp_s with size 33030144 and alignment 16, "
        "but only 0 bytes available in AlignedAllocator. Increase the workspace buffer size.",
        says="workspace",
        never=r"fit\(",
    ),
    Reported(
        "requests that vLLM preempts",
        "cap",
        "max_num_seqs",
        "WARNING 08-20 10:18:39 scheduler.py:1141] Sequence group 147 is preempted by PreemptionMode.RECOMPUTE mode "
        "because there is not enough KV cache space. This can affect the end-to-end performance. Increase "
        "gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory. total_num_cumulative_preemption=1",
        says="warning",
        never=r"fit\(",
    ),
    Reported(
        "SGLang's full cache",
        "cap",
        "--max-running-requests",
        "RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 8192 tokens.\n"
        "Available tokens: 5120\n",
        says="KV cache",
        never=r"fit\(",
    ),
    Reported(
        "requests that SGLang retracts",
        "cap",
        "--max-running-requests",
        "[2025-12-12 08:43:59 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.71 -> 1.0",
        says="KV cache",
    ),
    Reported(
        "LM Studio's guardrails",
        "cap",
        "shorter context",
        "Error: Model loading was stopped due to insufficient system resources. Under the current settings, this model "
        "requires approximately 57.29 GB of memory, and continuing to load it would likely overload your system.",
        says="guardrail",
        never="nvidia|fit\\(",
    ),
    Reported(
        "MLC-LLM before it loads",
        "true-need",
        "gpu_memory_utilization",
        "ValueError: Insufficient GPU memory error: The available single GPU memory is 5734.398 MB, which is less than the "
        "sum of model weight size (4308.133 MB) and temporary buffer size (1941.235 MB).",
        never=r"fit\(",
    ),
    Reported(
        "ncnn on Vulkan",
        "not-pytorch",
        "smaller images",
        "vkAllocateMemory failed -2\nvkAllocateMemory failed -2\nvkWaitForFences failed -4",
        never="nvidia-smi|PyTorch",
    ),
    Reported(
        "a buffer beyond Vulkan's limit",
        "cap",
        "smaller",
        "ggml_vulkan: Device memory allocation of size 4831838208 failed.\n"
        "ggml_vulkan: Requested buffer size exceeds device memory allocation limit: ErrorOutOfDeviceMemory",
        says="single",
        never=r"fit\(",
    ),
    Reported(
        "ONNX Runtime on DirectML",
        "true-need",
        "smaller",
        "onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException: [ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : "
        "Non-zero status code returned while running Conv node. Exception(3) tid(4304) 8007000E Not enough memory resources "
        "are available to complete this operation.",
        never="nvidia|torch\\.cuda|fit\\(",
    ),
    Reported(
        "JavaScript in a browser",
        "cap",
        "smaller",
        "Uncaught RangeError: WebAssembly.Memory(): could not allocate memory",
        never="nvidia|fit\\(",
    ),
    # --- frameworks
    Reported(
        "fairseq that recovers",
        "true-need",
        "--max-tokens",
        FAIRSEQ
        + "OOM: Ran out of memory with exception: CUDA out of memory. Tried to allocate 28.00 MiB (GPU 1; 10.92 GiB total "
        "capacity; 10.13 GiB already allocated; 13.38 MiB free; 10.33 GiB reserved in total by PyTorch)\n"
        + FAIRSEQ
        + "attempting to recover from OOM in forward/backward pass",
        says="10\\.1 GiB",
    ),
    Reported(
        "fairseq that recovers, without numbers",
        "true-need",
        "--max-tokens",
        FAIRSEQ + "attempting to recover from OOM in forward/backward pass\n",
    ),
    Reported(
        "fairseq beside another process",
        "other-process",
        "nvidia-smi",
        FAIRSEQ
        + "OOM: Ran out of memory with exception: CUDA out of memory. Tried to allocate 28.00 MiB (GPU 1; 10.92 GiB total "
        "capacity; 1.13 GiB already allocated; 13.38 MiB free; 1.33 GiB reserved in total by PyTorch)\n",
        never="--max-tokens",
    ),
    Reported(
        "Jittor",
        "true-need",
        "smaller batch",
        "[f 1121 22:05:43.125153 88 mem_info.cc:272]\n*******************\n"
        "GPU memory is overflow, please reduce your batch_size or data size!\nTotal: 79.33GB Used:  78.5GB",
        never=r"fit\(",
    ),
    Reported(
        "DeepSpeed's cache flushes",
        "true-need",
        "lower the peak",
        "[2022-07-13 21:09:13,651] [WARNING] [stage3.py:2391:step] 2 pytorch allocator cache flushes since last step. this "
        "happens when there is high memory pressure and is detrimental to performance.",
        says="warning",
    ),
    Reported(
        "Graphcore's tiles",
        "true-need",
        "available memory proportion",
        "popart_core.poplar_exception: Out of memory: Cannot fit all variable data onto one or more tiles. Profile saved "
        "to: ./profile.pop",
        never="nvidia|fit\\(",
    ),
    Reported(
        "cuDNN that TensorFlow cannot start",
        "other-process",
        "nvidia-smi",
        "UnknownError: Failed to get convolution algorithm. This is probably because cuDNN failed to initialize, so try "
        "looking to see if a warning log message was printed above. [Op:Conv2D]",
        says="ALLOW_GROWTH",
        never=r"fit\(",
        certain=False,
    ),
    Reported(
        "cuBLAS that TensorFlow cannot start",
        "other-process",
        "nvidia-smi",
        "InternalError: Blas GEMM launch failed : a.shape=(128, 784), b.shape=(784, 512), m=128, n=512, k=784",
        says="ALLOW_GROWTH",
        certain=False,
    ),
    Reported(
        "batched products that TensorFlow cannot start",
        "other-process",
        "nvidia-smi",
        "InternalError: Blas xGEMMBatched launch failed : a.shape=[96,128,64], b.shape=[96,128,64], m=128, n=128, k=64",
        certain=False,
    ),
    Reported(
        "buffers of OpenBLAS",
        "host-memory",
        "ulimit -v",
        "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
    ),
    Reported(
        "PaddlePaddle on the host",
        "host-memory",
        "free -h",
        "ResourceExhaustedError: Fail to alloc memory of 268435456 size, error code is 12.\n  [Hint: Expected error == 0, but "
        "received error:12 != 0:0.]",
        never="nvidia|fit\\(",
    ),
    Reported(
        "spconv",
        "not-pytorch",
        "nvidia-smi",
        "RuntimeError: /spconv/src/spconv/indice.cu 125 cuda execution failed with error 2",
    ),
    Reported(
        "PyCUDA",
        "not-pytorch",
        "nvidia-smi",
        "pycuda._driver.MemoryError: cuMemAlloc failed: out of memory",
        never="main memory is used up",
    ),
    Reported(
        "Theano",
        "not-pytorch",
        "nvidia-smi",
        "MemoryError: Error allocating 150994944 bytes of device memory (CNMEM_STATUS_OUT_OF_MEMORY).",
        never="main memory is used up",
    ),
    Reported(
        "CuPy before 6",
        "true-need",
        "smaller arrays",
        "cupy.cuda.memory.OutOfMemoryError: out of memory to allocate 8589934592 bytes (total 16106127360 bytes)",
        says="8 GiB",
        never="fit\\(",
    ),
    Reported(
        "THC's check alone",
        "not-pytorch",
        "nvidia-smi",
        "THCudaCheck FAIL file=/pytorch/aten/src/THC/THCGeneral.cpp line=50 error=2 : out of memory",
    ),
    Reported(
        "Spark's results",
        "cap",
        "spark.driver.maxResultSize",
        "org.apache.spark.SparkException: Job aborted due to stage failure: Total size of serialized results of 16 tasks "
        "(1048.5 MiB) is bigger than spark.driver.maxResultSize (1024.0 MiB)",
        never="nvidia",
    ),
    Reported(
        "Java that cannot commit memory",
        "host-memory",
        "-Xmx",
        "OpenJDK 64-Bit Server VM warning: INFO: os::commit_memory(0x00000006c0000000, 3221225472, 0) failed; error='Not "
        "enough space' (errno=12)\n# There is insufficient memory for the Java Runtime Environment to continue.",
        never="nvidia|fit\\(",
    ),
    Reported(
        "a worker of Dask that pauses",
        "host-memory",
        "smaller partitions",
        "distributed.worker.memory - WARNING - Worker is at 81% memory usage. Pausing worker.  Process memory: 6.04 GiB -- "
        "Worker memory limit: 7.45 GiB",
        says="pause",
        never="restarted",
    ),
    # --- sizes
    Reported(
        "NumPy's too big array",
        "huge-tensor",
        "print the sizes",
        "ValueError: array is too big; `arr.size * arr.dtype.itemsize` is larger than the maximum possible size.",
        never=r"fit\(",
    ),
    Reported(
        "a storage whose size overflows",
        "huge-tensor",
        "print the sizes",
        "RuntimeError: Storage size calculation overflowed with sizes=[4294967296, 4294967296]",
        never=r"fit\(",
    ),
    Reported(
        "a region on macOS",
        "huge-tensor",
        "find the operation",
        "python3.11(7731,0x1dfb1d000) malloc: can't allocate region :*** mach_vm_map(size=137438953472, flags: 100) failed "
        "(error code=3)",
        says="128 GiB",
    ),
    Reported(
        "a large allocation that tcmalloc refuses",
        "huge-tensor",
        "find the operation",
        "tcmalloc: large alloc 137438953472 bytes == (nil) @  0x7f1d0a1f2b6b 0x7f1d0a212379",
        says="128 GiB",
    ),
    # --- limits that are no memory
    Reported(
        "too many open files among workers",
        "cap",
        "ulimit -n",
        "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the limit "
        "using `ulimit -n` in the shell or change the sharing strategy by calling "
        "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code",
        says="not what ran out",
    ),
    Reported(
        "a block for thread-local variables",
        "cap",
        "LD_PRELOAD",
        "ImportError: /usr/lib/aarch64-linux-gnu/libgomp.so.1: cannot allocate memory in static TLS block",
        says="not what ran out",
        never="fit\\(|nvidia",
    ),
    Reported(
        "threads of OpenMP",
        "cap",
        "OMP_NUM_THREADS",
        "OMP: Error #34: System unable to allocate necessary resources for OMP thread:\nOMP: System error #11: Resource "
        "temporarily unavailable",
    ),
    Reported(
        "regions of OpenBLAS",
        "cap",
        "OPENBLAS_NUM_THREADS",
        "BLAS : Program is Terminated. Because you tried to allocate too many memory regions.",
    ),
    Reported(
        "a checkpoint that is not written",
        "cap",
        "df -h",
        "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/3: file "
        "write failed",
        says="disk",
        never="nvidia|fit\\(",
        certain=False,
    ),
    Reported(
        "a checkpoint that is cut off",
        "cap",
        "df -h",
        "RuntimeError: [enforce fail at inline_container.cc:337] . unexpected pos 190007680 vs 190007572",
        says="disk",
        certain=False,
    ),
    Reported(
        "a quota",
        "cap",
        "quota",
        "OSError: [Errno 122] Disk quota exceeded: '/home/u/runs/checkpoint-500/optimizer.pt'",
        never="nvidia|fit\\(",
    ),
    Reported(
        "a disk that safetensors fills",
        "cap",
        "df -h",
        'safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No '
        'space left on device" })',
        never="/dev/shm",
    ),
    Reported(
        "a disk that TensorFlow fills",
        "cap",
        "df -h",
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: /data/ckpt/model.tempstate1; No space left on device "
        "[Op:SaveV2]",
        never="nvidia",
    ),
    Reported(
        "a disk that Ray fills",
        "cap",
        "df -h",
        "ray.exceptions.OutOfDiskError: Local disk is full. The object cannot be created because the local object store is "
        "full and the local disk's utilization is over capacity (95% by default).",
    ),
    Reported(
        "a node without disk space",
        "cap",
        "df -h",
        "Status: Failed  Reason: Evicted  Message: The node was low on resource: ephemeral-storage. Container main was using "
        "41Gi, which exceeds its request of 0.",
        never="nvidia|GPU",
    ),
    Reported(
        "shared memory of Open MPI",
        "cap",
        "shm-size",
        "It appears as if there is not enough space for /dev/shm/vader_segment.node1.1000.1a2b0001.3 (the shared-memory "
        "backing file). It is likely that your MPI job will now either abort or experience performance degradation.",
    ),
    # --- programs that are ended
    Reported(
        "zsh's job",
        "host-memory",
        "dmesg",
        "[1]    23154 killed     python train.py --epochs 10",
        certain=False,
    ),
    Reported(
        "Nextflow",
        "host-memory",
        "dmesg",
        "Error executing process > 'TRAIN (1)'\nCaused by:\n  Process `TRAIN (1)` terminated with an error exit status (137)",
        certain=False,
    ),
    Reported(
        "systemd without a reason",
        "host-memory",
        "dmesg",
        "trainer.service: Main process exited, code=killed, status=9/KILL",
        certain=False,
    ),
    Reported(
        "Azure Pipelines",
        "host-memory",
        "dmesg",
        "##[error]Bash exited with code '137'.",
        certain=False,
    ),
    Reported(
        "Intel MPI",
        "host-memory",
        "dmesg",
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 3 PID 210145 RUNNING AT node07\n"
        "=   KILLED BY SIGNAL: 9 (Killed)",
        certain=False,
    ),
    Reported(
        "Bitbucket Pipelines",
        "host-memory",
        "larger memory size",
        "Container 'Build' exceeded memory limit.",
    ),
    Reported(
        "Cloud Functions",
        "host-memory",
        "larger memory size",
        "Function invocation was interrupted. Error: memory limit exceeded.",
    ),
    Reported(
        "a node under pressure",
        "host-memory",
        "resources.requests.memory",
        "Status: Failed  Reason: Evicted  Message: Pod The node had condition: [MemoryPressure].",
    ),
    Reported(
        "a build step of Docker",
        "host-memory",
        "MAX_JOBS",
        "c++: fatal error: Killed signal terminated program cc1plus\nERROR: failed to solve: ResourceExhausted: process "
        '"/bin/sh -c pip install flash-attn" did not complete successfully: cannot allocate memory',
    ),
    Reported(
        "a step of Docker that lacks memory",
        "host-memory",
        "give the builder more memory",
        'ERROR: failed to solve: ResourceExhausted: process "/bin/sh -c python warm.py" did not complete successfully: cannot '
        "allocate memory",
        never="fit\\(",
    ),
    Reported(
        "an older compiler",
        "host-memory",
        "MAX_JOBS",
        "g++: internal compiler error: Killed (program cc1plus)\nPlease submit a full bug report,",
    ),
    Reported(
        "a compiler that says so itself",
        "host-memory",
        "MAX_JOBS",
        "cc1plus: out of memory allocating 65536 bytes after a total of 1476583424 bytes",
    ),
    Reported(
        "LLVM",
        "host-memory",
        "MAX_JOBS",
        "LLVM ERROR: out of memory\nAllocation failed\nPLEASE submit a bug report to https://github.com/llvm/llvm-project",
    ),
    Reported(
        "Microsoft's compiler",
        "host-memory",
        "MAX_JOBS",
        "C:\\x\\csrc\\flash_bwd.cu: fatal error C1060: compiler is out of heap space",
    ),
    Reported(
        "a linker",
        "host-memory",
        "MAX_JOBS",
        "collect2: fatal error: ld terminated with signal 9 [Killed]\ncompilation terminated.",
    ),
    Reported(
        "git",
        "host-memory",
        "free -h",
        "fatal: Out of memory, malloc failed (tried to allocate 5368709121 bytes)",
        never="fit\\(",
    ),
    # --- drivers
    Reported(
        "NCCL's multicast memory",
        "driver",
        "NCCL_NVLS_ENABLE=0",
        "node1:4008:4650 [0] transport/nvls.cc:254 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size "
        "2097152 : CUDA error 2 'out of memory'.\nThis is usually caused by a system or configuration error in the Fabric "
        "Manager or NVSwitches.",
        never=r"fit\(",
    ),
    Reported(
        "AMD's kernel driver",
        "not-pytorch",
        "rocm-smi",
        "[  812.311] amdgpu 0000:03:00.0: amdgpu: [drm:amdgpu_cs_ioctl] *ERROR* Not enough memory for command submission!",
        never="nvidia",
    ),
    Reported(
        "NVIDIA's kernel driver",
        "not-pytorch",
        "nvidia-smi",
        "[ 3121.4] NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from "
        "_memdescAllocInternal(pMemDesc) @ mem_desc.c:1359",
        certain=False,
    ),
    # --- Chinese
    Reported(
        "torch's message in Chinese",
        "true-need",
        "lowtide.fit(",
        "torch.cuda.OutOfMemoryError: CUDA 内存不足。尝试分配 20.00 MiB（GPU 0；总容量 8.00 GiB；已分配 6.79 GiB；0 字节空闲；"
        "PyTorch 总共保留 6.95 GiB）",
        says="6\\.79 GiB",
    ),
    Reported(
        "torch's message in Chinese, without spaces",
        "true-need",
        "lowtide.fit(",
        "运行时发生CUDA内存不足。尝试分配2.00GiB（GPU 0；总容量8.00GiB；已分配6.79GiB；512.00MiB空闲；PyTorch总共保留6.95GiB）",
        says="512 MiB",
    ),
    Reported(
        "a program's own words in Chinese",
        "true-need",
        "lowtide.fit(",
        "训练失败：显存不足，请减小 batch size 或图片分辨率",
        certain=False,
    ),
    Reported(
        "main memory in Chinese",
        "host-memory",
        "fewer DataLoader workers",
        "RuntimeError: DefaultCPUAllocator: 内存不足：您尝试分配 4294967296 字节。",
        says="4 GiB",
        never="nvidia",
    ),
]
