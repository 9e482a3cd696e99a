"""Beginnings of out-of-memory messages about devices: from torch, other frameworks, libraries and drivers."""

from __future__ import annotations

from lowtide.diagnostics.oom.message_head import MessageHead, head

_REFUSED = (
    r"[^\n]{0,120}?(?:[Oo]ut of memory|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)|CUDA_ERROR_OUT_OF_MEMORY)"
)
"""Pattern of the end of a message that states a function call and that memory ran out."""

DEVICE_HEADS: tuple[MessageHead, ...] = (
    # torch's own allocators, whose messages have numbers
    head("warming up sampler", r"\b(CUDA|HIP) out of memory occurred when warming up sampler", "", "vLLM's warm-up"),
    head(
        "out of memory",
        r"(?<!\b[Aa]void )(?<!\b[Pp]revent )(?<!\b[Ii]f )(?<!\bget )"
        r"\b(CUDA|HIP|XPU|NPU|MUSA|GCU|MLU|HPU) out of memory\b(?! (?:errors|issues|problems)\b)",
        "",
    ),
    head("cuda graph failed", r"Capture cuda graph failed: (CUDA|HIP) out of memory", "", "SGLang's graphs"),
    head("NVML_SUCCESS == ", r"NVML_SUCCESS == .{1,80}INTERNAL ASSERT FAILED", "cuda", "torch 2.1 and later"),
    head("Allocation on device", r"Allocation on device(?! \d)", "cuda", "ComfyUI's nodes"),
    head("would exceed allowed memory", r"Allocation on device \d{1,4} would exceed allowed memory", "cuda", "async"),
    head(
        "NOT allocate memory block", r"Current platform can NOT allocate memory block with size larger", "xpu", "IPEX"
    ),
    head("out of memory", r"MPS backend out of memory", "mps", "torch 1.13 and later"),
    head("Invalid buffer size", r"Invalid buffer size: \d[\d.]{0,40} ?(?:[KMGT]i?B|bytes|B)", "mps", "Metal"),
    head(
        "Insufficient Memory",
        r"(?:\[METAL\] Command buffer execution failed|ggml_metal.{1,80} with status 5).{0,40}Insufficient Memory",
        "mps driver",
        "Metal beside PyTorch",
    ),
    head("ErrorOutOfMemory", r"kIOGPUCommandBufferCallbackErrorOutOfMemory", "mps driver", "Metal"),
    head(
        "CPUAllocator",
        r"Default(?:Mobile)?CPUAllocator: (?:can't allocate|not enough) memory"
        r"(?:: you tried to allocate \d{1,40} bytes\. Error code 12 \(Cannot allocate memory\))?",
        "cpu",
        "torch 1.0 and later",
    ),
    head(
        "内存不足|足够的内存",
        r"Default(?:Mobile)?CPUAllocator[:\uff1a] ?(?:内存不足|没有足够的内存)",
        "cpu",
        "torch, translated",
    ),
    head("存不足", r"(?<![A-Za-z0-9_])CUDA ?[内显]存不足", "cuda", "torch, translated"),
    head(
        "显存",
        r"(?<!如果)(?<!若)(?<!避免)(?<!防止)(?<!以防)(?<!当)显存(?:不足|不够|溢出)(?!时|的话|的情况|问题)",
        "cuda",
        "a program's own words",
        certain=False,
    ),
    head("posix_memalign", r"enforce fail at .{0,40}CPUAllocator\.cpp:\d+\] posix_memalign", "cpu", "torch 1.0"),
    head("$ Torch", r"\$ Torch: not enough memory", "cpu", "torch 0.4"),
    head("C10 Out", r"C10 Out of Memory", "cpu", "torch, mobile"),
    head("out of device memory", r"Allocation is out of device memory on current platform", "xpu", "IPEX"),
    head(
        "total bytes of NDArray|NDArray dimension",
        r"total bytes of NDArray > 2\*\*32|NDArray dimension length > INT_MAX",
        "mps",
        "arrays of MPS",
    ),
    # other devices and frameworks, with their own allocators
    head("Allocation failed for size", r"PT_DEVMEM.{0,40}Allocation failed for size", "hpu", "Gaudi"),
    head(
        "not enough GPU video memory", r"Could not allocate tensor with \d[\d,]{0,40} bytes\. There is not", "directml"
    ),
    head("Failed to alloc", r"Failed to alloc(?:ate)? (?:DEVICE|HOST) memory", "neuron", "Neuron runtime"),
    head(
        "Allocation Failure|NRT_RESOURCE",
        r"status(?:=| |: )?4(?: \(?|, msg=)Allocation Failure|NRT_RESOURCE",
        "neuron",
        "Neuron",
    ),
    head("on nd", r"Failed to allocate \d{1,20} bytes [^\n]{0,60}on nd\d{1,3}:nc\d{1,3}", "neuron", "Neuron runtime"),
    head(
        "runner process has",
        r"llama runner process has terminated: .{0,80}(?:out of memory|unable to allocate \w{1,20} buffer)",
        "cuda",
        "Ollama's runner",
    ),
    head(
        "CL_|clE|MEM_OBJECT",
        r"(?:pyopencl\.\w{1,20}\.\w{0,20}Error: )?(?:(?<!\()\bCL_(?:OUT_OF_(?:RESOURCES|HOST_MEMORY)"
        r"|MEM_OBJECT_ALLOCATION_FAILURE)|cl[EC]\w{1,40}: -[456]\b"
        r"|\w{1,40} failed: (?:OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY|MEM_OBJECT_ALLOCATION_FAILURE))",
        "opencl",
        "OpenCL",
    ),
    head("metal::malloc", r"\[metal::malloc\] (?:Attempting|Unable) to allocate", "mps", "MLX"),
    head("[malloc", r"\[malloc(?:_or_wait)?\] Unable to allocate \d{1,20} bytes", "mps", "Metal beside PyTorch"),
    head(
        "memory space vmem|memory space smem|exceeded scoped vmem",
        r"(?:(?:RESOURCE_EXHAUSTED|Resource exhausted): .{0,80})?"
        r"(?:Ran out of memory in memory space (?:vmem|smem)|exceeded scoped vmem limit)",
        "xla",
        "scratch memory of a TPU",
    ),
    head(
        "RESOURCE_EXHAUSTED|Resource exhausted",
        r"(?:RESOURCE_EXHAUSTED|Resource exhausted): .{0,80}(?:XLA:TPU|memory space hbm)",
        "xla",
        "XLA for TPU",
    ),
    head(
        "RESOURCE_EXHAUSTED|Resource exhausted|for new constant",
        r"RESOURCE_EXHAUSTED: .{0,80}(?:[Oo]ut of memory|OOM|Failed to allocate)"
        r"|INTERNAL: Failed to allocate \d{1,20} bytes for new constant"
        r"|Resource exhausted: (?:[Oo]ut of memory|OOM)",
        "jax",
        "XLA",
    ),
    head(
        "library initialization failed",
        r"FAILED_PRECONDITION: DNN library initialization failed",
        "jax",
        "libraries of XLA",
        certain=False,
    ),
    head(
        "from device: ",
        r"[Ff]ailed to allocate \S{1,20} \(\d{1,20} bytes\) from device: .{0,40}"
        r"(?:CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOfMemory|hipErrorOutOfMemory)",
        "jax",
        "pools of TensorFlow and JAX",
    ),
    head(
        "ran out of memory trying",
        r"Allocator \(\w{1,40}\) ran out of memory trying to allocate \d[\d.]{0,20}[KMG]iB with freed_by_count=\d{1,9}"
        r"\. The caller indicates that this is not a failure",
        "jax",
        "warnings of TensorFlow",
        certain=False,
    ),
    head("ran out of memory trying", r"Allocator \(\w{1,40}\) ran out of memory trying to allocate", "jax", "XLA"),
    head(
        "OOM when allocating",
        r"OOM when allocating tensor with shape\S{1,200} and type \w{1,20} on \S{0,200}CPU:\d{1,4}",
        "system",
        "TensorFlow on the host",
    ),
    head("OOM when allocating", r"OOM when allocating tensor with shape", "jax", "TensorFlow"),
    head("o allocate memory [Op:", r"failed to allocate memory \[Op:\w{1,60}\]", "jax", "TensorFlow"),
    head(
        "% of free system|% of system",
        r"Allocation of \d{1,20} exceeds \d{1,3}% of (?:free )?system memory\.? Killed\b",
        "system",
        "TensorFlow on the host",
    ),
    head("Dst tensor is not", r"Dst tensor is not initialized", "jax", "copies of TensorFlow"),
    head("GPU memory is overflow", r"GPU memory is overflow, please reduce your batch_size", "jax", "Jittor"),
    head(
        "convolution algorithm|launch failed|cudnn handle: |cublas handle: ",
        r"Failed to get convolution algorithm\. This is probably because cuDNN failed"
        r"|Blas \w{0,8}GEMM\w{0,16} launch failed|[Cc]ould not create cudnn handle: CUDNN_STATUS_INTERNAL_ERROR"
        r"|failed to create cublas handle: CUBLAS_STATUS_NOT_INITIALIZED",
        "jax",
        "libraries of TensorFlow",
        certain=False,
    ),
    head(
        "Cannot fit all variable",
        r"Out of memory: Cannot fit all variable data onto one or more tiles",
        "ipu",
        "Graphcore",
    ),
    head("Cannot allocate", r"Cannot allocate \d[\d.]{0,20}[KMG]?B memory on GPU \d{1,4}", "jax", "PaddlePaddle"),
    head("Out of GPU memory", r"Out of GPU memory(?: trying to allocate \d[\d.]{0,20} [KMG]?i?B)?", "jax", "CUDA.jl"),
    head("enough and alloc failed", r"memory isn't enough and alloc failed", "jax", "MindSpore"),
    head("cudaMalloc retry failed", r"cudaMalloc retry failed: out of memory", "jax", "MXNet"),
    head(
        "Not enough space to allocate", r"Not enough space to allocate \d{1,20} B \w{1,9} buffer", "jax", "Tenstorrent"
    ),
    head("prefill tokens", r"Not enough memory to handle \d{1,12} prefill tokens", "cuda", "TGI"),
    head("more system memory", r"model requires more system memory \(\d[\d.]{0,20} [KMG]i?B\)", "system", "Ollama"),
    head(
        "memory allocation limit|buffer size limit",
        r"Requested buffer size exceeds device (?:memory allocation|buffer size) limit(?:: ErrorOutOfDeviceMemory)?",
        "jax",
        "Vulkan's largest buffer",
    ),
    head(
        "ErrorOutOfDeviceMemory|_OUT_OF_DEVICE_MEMORY|vkAllocateMemory failed",
        r"\bErrorOutOfDeviceMemory|VK_ERROR_OUT_OF_DEVICE_MEMORY|\bvkAllocateMemory failed -[12]\b",
        "jax",
        "Vulkan",
    ),
    head("memory in memory space", r"Ran out of memory in memory space hbm", "xla", "XLA for TPU"),
    head(
        "That was not possible",
        r"Attempting to (?:allocate|reserve) \d[\d.]{0,40}[KMG]\b.{0,40} That was not possible",
        "xla",
        "XLA",
    ),
    head(
        "Out of memory allocating|out of memory to allocate",
        r"Out of memory allocating \d[\d,]{0,40} bytes"
        r"|out of memory to allocate \d{1,20} bytes \(total \d{1,20} bytes\)",
        "cuda",
        "CuPy",
    ),
    head("8007000E", r"\b8007000E\b", "directml", "DirectML"),
    head(
        "smaller than requested", r"Available memory of \d{1,20} is smaller than requested bytes of \d", "cuda", "ORT"
    ),
    head("requested buffer of size", r"Failed to allocate memory for requested buffer of size", "cuda", "ONNX Runtime"),
    head(
        "alloc failed: out of memory",
        r"allocating \d[\d.,]{0,20} MiB on device \d{1,4}: (?:cuda|hip)Malloc failed: out of memory",
        "cuda",
        "llama.cpp",
    ),
    head(
        "buffer of size|allocate buffer|insufficient memory",
        r"ggml\S{1,80}: (?:failed to allocate (?:CPU\w{0,20} |\w{1,20}_Host |)buffer of size \d"
        r"|insufficient memory \(attempted to allocate)",
        "system",
        "llama.cpp on the host",
    ),
    head(
        "buffer of size|allocate buffer|nable to allocate |Bytes of memory on device|buffer for kv|buffer for rs",
        r"(?:ggml|alloc)\S{1,80}: (?:error: )?failed to allocate (?:\w{1,20} buffer of size \d|buffer, size =)"
        r"|llama_\w{1,40}: failed to allocate buffer for (?:kv|rs) cache"
        r"|can't allocate \d{1,20} Bytes of memory on device"
        r"|unable to allocate (?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)\d{0,3} buffer",
        "cuda",
        "llama.cpp",
    ),
    head(
        "pinned memory",
        r"ggml\S{1,80}: (?:failed to allocate \d[\d.,]{0,20} MiB of|Failed to allocate) pinned memory",
        "system",
        "pinned memory of llama.cpp",
    ),
    head(
        "context's memory pool",
        r"not enough space in the (?:context's memory pool|scratch memory pool) \(needed \d{1,20}, available \d",
        "system",
        "pools of llama.cpp",
    ),
    head(
        "current device: |ggml-cuda.cu:",
        r"(?:CUDA|ROCm|HIP) error: out of memory current device: \d{1,4}, in function \w{1,80} at \S{0,300}ggml"
        r"|CUDA error 2 at \S{0,300}ggml-cuda\.cu:\d{1,6}: out of memory",
        "cuda",
        "llama.cpp",
    ),
    head("Insufficient ", r"Insufficient (?:VRAM (?:for|in)|space in device allocation)", "cuda", "ExLlama"),
    head(
        "alloc fail type|allocator fail type|ailed to cudaMalloc",
        r"StandardGpuResources: (?:Faiss device allocator|alloc) fail type|[Ff]ailed to cudaMalloc \d{1,20} bytes",
        "cuda driver",
        "Faiss",
    ),
    head(
        "allocation error on worker|TOutOfMemoryError|stack_like_memory_pool|[CUDA] out of|CUDA error 2",
        r"Memory allocation error on worker \d{1,6}: (?:std::)?bad_alloc: cudaErrorMemoryAllocation"
        r"|NCudaLib::TOutOfMemoryError|stack_like_memory_pool\.h:\d{1,6}: Error: Out of memory"
        r"|catboost/cuda\S{1,200} CUDA error 2: out of memory|\[LightGBM\] \[Fatal\] \[CUDA\] out of memory",
        "cuda driver",
        "boosted trees",
    ),
    head(
        "ALLOCATOR_FAILURE|bytes on device|CUDA allocation failed",
        r"NVJPEG_STATUS_ALLOCATOR_FAILURE|Critical error in pipeline:.{0,200}"
        r"(?:Can't allocate \d{1,20} bytes on device|CUDA allocation failed)",
        "cuda driver",
        "DALI",
    ),
    head(
        "memory object allocation",
        r"\[GPU\] Exceeded max size of memory object allocation",
        "opencl",
        "OpenVINO",
    ),
    head("NvMapMem", r"NvMapMemAllocInternalTagged: \d{1,12} error 12", "cuda", "Jetson"),
    head("memory on device.", r"\bOut of memory on device\.", "cuda driver", "MATLAB"),
    head("CUDA failed with error", r"CUDA failed with error out of memory", "cuda driver", "CTranslate2"),
    head("CUDA failure 2", r"CUDA failure 2: out of memory ?;", "cuda driver", "ONNX Runtime"),
    head("Gpu API call", r"\(-217:Gpu API call\) out of memory", "cuda driver", "OpenCV on a GPU"),
    head(
        "use lower resolution",
        r"Not enough memory, use lower resolution \(max approx\. \d{1,6}x\d{1,6}\)",
        "cuda",
        "Stable Diffusion web UI",
    ),
    head("offloaded to the disk", r"`device_map` had weights offloaded to the disk", "cuda", "device_map's disk"),
    head("dispatched on the CPU", r"[Ss]ome modules are dispatched on the CPU or the disk", "cuda", "device_map"),
    head(
        "alloc failed",
        r"\bds4: \w{1,12} (?:model arena|tensor) alloc failed"
        r"(?: for \S{1,80} \([\d.]{1,20} MiB chunk\))?: out of memory",
        "cuda",
        "ds4",
    ),
    head(
        "in AlignedAl",
        r"(?:Failed to allocate memory for|Buffer overflow when allocating memory for) \w{1,60} with size \d{1,20} and "
        r"alignment .{1,60}in AlignedAl|Out of workspace memory in AlignedAl",
        "cuda",
        "FlashInfer",
    ),
    head(
        "enough KV cache space",
        r"is preempted by PreemptionMode\.\w{1,12} mode because there is not enough KV cache space",
        "cuda",
        "vLLM's preemptions",
    ),
    head(
        "out of memory. Try to lower|Retract requests",
        r"(?:Prefill|Decode) out of memory\. Try to lower your batch size|KV cache pool is full\. Retract requests",
        "cuda",
        "SGLang's cache",
    ),
    head(
        "Insufficient GPU memory error",
        r"Insufficient GPU memory error: The available single GPU memory is",
        "cuda",
        "MLC-LLM",
    ),
    head("available memory for the cache", r"No available memory for the cache blocks", "cuda", "vLLM"),
    head(
        "KV cache memory", r"KV cache is needed, which is larger than the available KV cache memory", "cuda", "KV cache"
    ),
    head(
        "can be stored in KV cache",
        r"is larger than the maximum number of tokens that can be stored in KV cache",
        "cuda",
        "KV cache",
    ),
    head("in memory profiling", r"Error in memory profiling\. Initial free memory", "cuda", "vLLM's profiling"),
    head("capacity is unbalanced", r"The memory capacity is unbalanced", "cuda", "SGLang's start"),
    head(
        "Free memory on device",
        r"Free memory on device \S{0,20} ?\([\d.]{1,20}/[\d.]{1,20} GiB\)",
        "cuda",
        "vLLM's start",
    ),
    head(
        "mem-fraction-static",
        r"Not enough memory\. Please try to (?:in|de)crease --mem-fraction-static",
        "cuda",
        "SGLang",
    ),
    head(
        "an out of memory with exception|skipping batch|recover from OOM",
        r"(?:OOM: R|WARNING: r)an out of memory with exception:(?: (?:CUDA|HIP) out of memory)?"
        r"|ran out of memory(?: on GPU #\d{1,4})?, skipping batch"
        r"|attempting to recover from OOM in forward/backward pass",
        "cuda",
        "fairseq",
    ),
    head(
        "allocator cache flushes",
        r"\d{1,6} pytorch allocator cache flushes since last step",
        "cuda",
        "cache flushes of DeepSpeed",
    ),
    head(
        "OOM during optimization",
        r"OOM during optimization, irrecoverable",
        "cuda",
        "fairseq's optimizer",
    ),
    head("OutOfMemoryError in Task", r"CUDA OutOfMemoryError in TaskAlignedAssigner", "cuda", "Ultralytics"),
    head(
        "retrying with tiled",
        r"Ran out of memory when regular VAE (?:en|de)coding, retrying with tiled",
        "cuda",
        "ComfyUI",
    ),
    # the driver, called by torch or by a library outside torch's allocator
    head("udaHost|cuMemHost", r"\bcu(?:daHost|MemHost)(?:Register|Alloc)\b" + _REFUSED, "cuda driver", "CUDA"),
    head("hipHost|hipMemHost", r"\bhip(?:Host|MemHost)(?:Register|Alloc|Malloc)\b" + _REFUSED, "hip driver", "ROCm"),
    head(
        "pinned host memory|bytes on host: ",
        r"could not allocate pinned host memory of size"
        r"|failed to alloc \d{1,20} bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        "cuda driver",
        "TensorFlow, pinned memory",
    ),
    head("CudaError: out of memory", r"\bCudaError: out of memory \(2\)", "cuda driver", "torch 1.0 and later"),
    head(
        "Error out of memory at line",
        r"Error out of memory at line \d{1,6} in file \S{0,300}pythonInterface",
        "cuda driver",
        "paged memory of bitsandbytes",
    ),
    head("Error out of memory at line", r"Error out of memory at line \d{1,6} in file", "cuda driver", "bitsandbytes"),
    head(
        "nvinfer1::|Cuda Runtime (out|OutOfMemory (no|amount of GPU memory|User allocator error",
        r"Cuda Error in nvinfer1::\S{1,100}: 2 \(out of memory\)"
        r"|Error Code \d{1,3}: (?:Cuda Runtime \(out of memory\)|OutOfMemory \(no further)"
        r"|User allocator error allocating \d{1,20}-byte buffer"
        r"|Requested amount of GPU memory \(\d{1,20} bytes\) could not be allocated",
        "cuda driver",
        "TensorRT",
    ),
    head(
        "insufficient to use tactic|Skipping tactic",
        r"Device memory is insufficient to use tactic|Skipping tactic \d{1,9} due to insuff?icient memory",
        "cuda driver",
        "tactics of TensorRT",
        certain=False,
    ),
    head(
        "bad_alloc: |RMM_ERROR_OUT",
        r"std::bad_alloc: (?:out_of_memory: )?(?:CUDA|RMM)\b|RMM_ERROR_OUT_OF_MEMORY",
        "cuda driver",
        "RAPIDS",
    ),
    head(
        "[TensorRT-LLM]",
        r"\[TensorRT-LLM\].{0,200}CUDA runtime error in \S{1,60}Malloc\w{0,10}(?:\([^\n]{0,100}\))?: out of memory",
        "cuda driver",
        "TensorRT-LLM",
    ),
    head("[TM]", r"\[TM\]\[ERROR\] .{0,40}CUDA runtime error: out of memory", "cuda driver", "LMDeploy"),
    head(
        "numba.cuda", r"numba\.cuda\.cudadrv\.\S{1,60}: \[2\] Call to cuMem\w{1,30} results in", "cuda driver", "Numba"
    ),
    head(
        "alloc(|alloc failed|Alloc failed|Alloc(",
        r"cu(?:da)?\w{0,20}[Aa]lloc\w{0,20}(?:\([^)\n]{0,200}\))? failed: out of memory",
        "cuda driver",
        "CUDA",
    ),
    head(
        "alloc(|alloc failed",
        r"hip\w{0,20}[Mm]alloc\w{0,20}(?:\([^)\n]{0,200}\))? failed: out of memory",
        "hip driver",
        "ROCm",
    ),
    head(
        "device memory (|error 2|THCudaCheck FAIL",
        r"Error allocating \d{1,20} bytes of device memory \((?:CNMEM_STATUS_OUT_OF_MEMORY|out of memory)\)"
        r"|\.cu \d{1,6} cuda execution failed with error 2\b"
        r"|THCudaCheck FAIL file=(?!\S{0,300}THC(?:Storage|Tensor|CachingAllocator))\S{1,300} line=\d{1,6} "
        r"error=2 : out of memory",
        "cuda driver",
        "CUDA",
    ),
    head("NV_ERR_NO_MEMORY", r"NVRM: .{0,80}Out of memory \[NV_ERR_NO_MEMORY\]", "cuda driver", "CUDA", certain=False),
    head("for command submission", r"Not enough memory for command submission", "hip driver", "ROCm"),
    head(
        "NVLink SHARP",
        r"Failed to bind NVLink SHARP \(NVLS\) Multicast memory.{0,60}CUDA error 2 'out of memory'",
        "nccl",
        "NCCL's multicast memory",
    ),
    head("Failed to CUDA", r"Failed to CUDA (?:host )?\w?[ac]l?loc\w{0,10}(?: async)? \d{1,20} bytes", "nccl", "NCCL"),
    head(
        "cuda runtime error",
        r"cuda runtime error \(2\) ?: out of memory(?: at \S{0,200}THC(?:Storage|Tensor|CachingAllocator)\S{0,80})",
        "cuda",
        "torch 0.4",
    ),
    head("cuda runtime error", r"cuda runtime error \(2\) ?: out of memory", "cuda driver", "torch 0.4"),
    head("out of memory", r"Triton Error \[(CUDA|HIP)\]:.{0,40} out of memory", "", "Triton"),
    head("out of resource: ", r"out of resource: [\w ]{1,120},? Required: \d", "triton", "Triton's shared memory"),
    head(
        "driver error: out of memory",
        r"CUDA driver error: out of memory",
        "cuda driver",
        "CUDA driver API, torch 2.1 and later",
    ),
    head(
        "ut of memory",
        r"CUDA (?:runtime )?[Ee]rror: [Oo]ut of memory|CUDA Error 2,? out of memory"
        r"|== cudaSuccess(?: \(2 vs\. 0\) | \|\| .{1,80}: CUDA: )out of memory",
        "cuda driver",
        "torch 1.0 and later",
    ),
    head("out of memory", r"HIP (?:driver |runtime )?error: out of memory", "hip driver", "torch for ROCm"),
    head(
        "CUDA_ERROR_OUT|cudaErrorMemory",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "cuda driver",
        "CUDA",
    ),
    head("hipErrorOutOfMemory|hipErrorMemory", r"hipError(?:OutOfMemory|MemoryAllocation)", "hip driver", "ROCm"),
    head("HSA_STATUS_ERROR_OUT", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES", "hip driver", "ROCm"),
    head(
        "EL0004|ACL_ERROR_RT_MEM|207001",
        r"EL0004: Failed to allocate memory|ACL_ERROR_RT_MEMORY_ALLOCATION|error code is 207001",
        "npu driver",
        "CANN",
    ),
    head(
        "device not ready", r"CUDA driver error: device not ready", "cuda driver", "torch 2.1 and later", certain=False
    ),
    head(
        "_ERROR_OUT|CL_OUT_OF|CL_MEM_OBJECT",
        r"(?:UR|ZE|PI)(?:_RESULT)?_ERROR_OUT_OF_(?:DEVICE_|HOST_)?(?:MEMORY|RESOURCES)"
        r"|CL_OUT_OF_(?:RESOURCES|HOST_MEMORY)|CL_MEM_OBJECT_ALLOCATION_FAILURE",
        "xpu driver",
        "oneAPI",
    ),
    head("Native API failed", r"Native API failed.{0,80}OUT_OF_RESOURCES", "xpu driver", "oneAPI", certain=False),
    head(
        "invalid configuration argument|too many resources",
        r"(?:(?:CUDA|HIP) error|Triton Error \[(?:CUDA|HIP)\]): "
        r"(?:invalid configuration argument|too many resources requested for launch)",
        "cuda",
        "limits of a launch",
    ),
    # torch makes the handle at the first matrix product, where the error of an earlier kernel appears as well
    head(
        "_STATUS_ALLOC_FAILED",
        r"\b(CUBLAS)_STATUS_ALLOC_FAILED when calling `?cublasCreate",
        "",
        "CUDA libraries",
        certain=False,
    ),
    head("_STATUS_ALLOC_FAILED", r"\b(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED", "", "CUDA libraries"),
    head("CURAND_STATUS_ALLOC", r"CURAND_STATUS_ALLOCATION_FAILED", "curand", "CUDA libraries"),
    head("_STATUS_ALLOC_FAILED", r"\b(HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED", "", "ROCm libraries"),
    head("DEVICE_ALLOCATION_FAILED", r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cudnn", "cuDNN 9"),
    head("HOST_ALLOCATION_FAILED", r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "cpu", "cuDNN 9"),
    head(
        "insufficient resources|INSUFFICIENT_RESOURCES",
        r"insufficient resources when calling .cusparse|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        "cusparse",
        "CUDA libraries",
    ),
    head("miopenStatusAllocFailed", r"miopenStatusAllocFailed", "miopen", "ROCm libraries"),
    head("CUFFT_ALLOC_FAILED", r"CUFFT_ALLOC_FAILED", "cufft", "CUDA libraries"),
    head(
        "_STATUS_NOT_INITIALIZED",
        r"\b(CUBLAS|CUDNN|CUSOLVER)_STATUS_NOT_INITIALIZED",
        "",
        "CUDA libraries",
        certain=False,
    ),
    head(
        "valid cuDNN algorithm", r"Unable to find a valid cuDNN algorithm", "cudnn", "torch 1.8 to 1.13", certain=False
    ),
    head(
        "unable to find an engine",
        r"(?:FIND|GET) was unable to find an engine to execute",
        "cudnn",
        "torch 2.0 and later",
        certain=False,
    ),
    head("uda failure", r"Cuda failure (?:2 )?'out of memory'", "nccl", "NCCL"),
    head("ip failure", r"HIP failure (?:2 )?'out of memory'", "rccl", "RCCL"),
    head(
        "INTERNAL ASSERT FAILED",
        r"handles_\.at\(i\) INTERNAL ASSERT FAILED",
        "cuda",
        "torch 2.1 and later",
        certain=False,
    ),
)
