"""First words of every out-of-memory message that Lowtide knows."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageHead:
    """Beginning of a message, and its source. `kind` is "" if the first group of the pattern states it.

    No pattern matches more characters than `text_stream.LONGEST`.
    """

    words: tuple[str, ...]
    """Every match of the pattern contains one of them."""
    pattern: re.Pattern[str]
    kind: str
    form: str = ""
    """Versions that print it, or the program: a key of `known_sources.SOURCES`."""
    certain: bool = True


def _head(words: str, pattern: str, kind: str, form: str = "", *, certain: bool = True) -> MessageHead:
    return MessageHead(tuple(words.split("|")), re.compile(pattern), kind, form, certain)


_SHELLS = "shells, torchrun and containers"
_SHM = "shared memory of workers"
_KILLED = "Getötet|Ucciso|Morto|Убито|已杀死|已殺死|已砍掉|強制終了|죽었음|Processus arrêté|Terminado (killed)"
"""Names of SIGKILL in shells of other languages."""
_ENOMEM = (
    "(?:Cannot allocate memory|Nicht genügend Hauptspeicher|Kann (?:nicht genügend )?Speicher nicht"
    "|Impossible d'allouer de la mémoire|No se pudo asignar memoria|Impossibile allocare memoria"
    "|Não foi possível alocar memória|Невозможно выделить память|无法分配内存|無法配置記憶體|メモリー?を確保できません"
    "|메모리를 할당할 수 없)"
)
"""The system's words for an error of number 12, in several languages."""
_REFUSED = (
    r"[^\n]{0,120}?(?:[Oo]ut of memory|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)|CUDA_ERROR_OUT_OF_MEMORY)"
)
"""Pattern of the rest of a message that names a call and says that memory ran out."""

HEADS = (
    # torch's own allocators, whose messages have numbers
    _head("warming up sampler", r"\b(CUDA|HIP) out of memory occurred when warming up sampler", "", "vLLM's warm-up"),
    _head(
        "out of memory",
        r"(?<!\b[Aa]void )(?<!\b[Pp]revent )(?<!\b[Ii]f )(?<!\bget )"
        r"\b(CUDA|HIP|XPU|NPU|MUSA|GCU|MLU|HPU) out of memory\b(?! (?:errors|issues|problems)\b)",
        "",
    ),
    _head("cuda graph failed", r"Capture cuda graph failed: (CUDA|HIP) out of memory", "", "SGLang's graphs"),
    _head("NVML_SUCCESS == ", r"NVML_SUCCESS == .{1,80}INTERNAL ASSERT FAILED", "cuda", "torch 2.1 and later"),
    _head("Allocation on device", r"Allocation on device(?! \d)", "cuda", "ComfyUI's nodes"),
    _head("would exceed allowed memory", r"Allocation on device \d{1,4} would exceed allowed memory", "cuda", "async"),
    _head(
        "NOT allocate memory block", r"Current platform can NOT allocate memory block with size larger", "xpu", "IPEX"
    ),
    _head("out of memory", r"MPS backend out of memory", "mps", "torch 1.13 and later"),
    _head("Invalid buffer size", r"Invalid buffer size: \d[\d.]{0,40} ?(?:[KMGT]i?B|bytes|B)", "mps", "Metal"),
    _head(
        "Insufficient Memory",
        r"(?:\[METAL\] Command buffer execution failed|ggml_metal.{1,80} with status 5).{0,40}Insufficient Memory",
        "mps driver",
        "Metal beside PyTorch",
    ),
    _head("ErrorOutOfMemory", r"kIOGPUCommandBufferCallbackErrorOutOfMemory", "mps driver", "Metal"),
    _head(
        "CPUAllocator",
        r"Default(?:Mobile)?CPUAllocator: (?:can't allocate|not enough) memory"
        r"(?:: you tried to allocate \d{1,40} bytes\. Error code 12 \(Cannot allocate memory\))?",
        "cpu",
        "torch 1.0 and later",
    ),
    _head("posix_memalign", r"enforce fail at .{0,40}CPUAllocator\.cpp:\d+\] posix_memalign", "cpu", "torch 1.0"),
    _head("$ Torch", r"\$ Torch: not enough memory", "cpu", "torch 0.4"),
    _head("C10 Out", r"C10 Out of Memory", "cpu", "torch, mobile"),
    _head("out of device memory", r"Allocation is out of device memory on current platform", "xpu", "IPEX"),
    _head(
        "total bytes of NDArray|NDArray dimension",
        r"total bytes of NDArray > 2\*\*32|NDArray dimension length > INT_MAX",
        "mps",
        "arrays of MPS",
    ),
    # other devices and frameworks, with their own allocators
    _head("Allocation failed for size", r"PT_DEVMEM.{0,40}Allocation failed for size", "hpu", "Gaudi"),
    _head(
        "not enough GPU video memory", r"Could not allocate tensor with \d[\d,]{0,40} bytes\. There is not", "directml"
    ),
    _head("Failed to alloc", r"Failed to alloc(?:ate)? (?:DEVICE|HOST) memory", "neuron", "Neuron runtime"),
    _head(
        "Allocation Failure|NRT_RESOURCE", r"status(?:=| |: )?4 \(?Allocation Failure|NRT_RESOURCE", "neuron", "Neuron"
    ),
    _head(
        "runner process has", r"llama runner process has terminated: .{0,80}out of memory", "cuda", "Ollama's runner"
    ),
    _head(
        "CL_|clE|MEM_OBJECT",
        r"(?:pyopencl\.\w{1,20}\.\w{0,20}Error: )?(?:(?<!\()\bCL_(?:OUT_OF_(?:RESOURCES|HOST_MEMORY)"
        r"|MEM_OBJECT_ALLOCATION_FAILURE)|cl[EC]\w{1,40}: -[456]\b"
        r"|\w{1,40} failed: (?:OUT_OF_RESOURCES|OUT_OF_HOST_MEMORY|MEM_OBJECT_ALLOCATION_FAILURE))",
        "opencl",
        "OpenCL",
    ),
    _head("metal::malloc", r"\[metal::malloc\] (?:Attempting|Unable) to allocate", "mps", "MLX"),
    _head("[malloc", r"\[malloc(?:_or_wait)?\] Unable to allocate \d{1,20} bytes", "mps", "Metal beside PyTorch"),
    _head(
        "RESOURCE_EXHAUSTED|Resource exhausted",
        r"(?:RESOURCE_EXHAUSTED|Resource exhausted): .{0,80}(?:XLA:TPU|memory space (?:hbm|vmem|smem))",
        "xla",
        "XLA for TPU",
    ),
    _head(
        "RESOURCE_EXHAUSTED|Resource exhausted|for new constant",
        r"RESOURCE_EXHAUSTED: .{0,80}(?:[Oo]ut of memory|OOM|Failed to allocate)"
        r"|INTERNAL: Failed to allocate \d{1,20} bytes for new constant"
        r"|Resource exhausted: (?:[Oo]ut of memory|OOM)",
        "jax",
        "XLA",
    ),
    _head(
        "library initialization failed",
        r"FAILED_PRECONDITION: DNN library initialization failed",
        "jax",
        "libraries of XLA",
        certain=False,
    ),
    _head(
        "from device: ",
        r"[Ff]ailed to allocate \S{1,20} \(\d{1,20} bytes\) from device: .{0,40}"
        r"(?:CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOfMemory|hipErrorOutOfMemory)",
        "jax",
        "pools of TensorFlow and JAX",
    ),
    _head(
        "ran out of memory trying",
        r"Allocator \(\w{1,40}\) ran out of memory trying to allocate \d[\d.]{0,20}[KMG]iB with freed_by_count=\d{1,9}"
        r"\. The caller indicates that this is not a failure",
        "jax",
        "warnings of TensorFlow",
        certain=False,
    ),
    _head("ran out of memory trying", r"Allocator \(\w{1,40}\) ran out of memory trying to allocate", "jax", "XLA"),
    _head(
        "OOM when allocating",
        r"OOM when allocating tensor with shape\S{1,200} and type \w{1,20} on \S{0,200}CPU:\d{1,4}",
        "system",
        "TensorFlow on the host",
    ),
    _head("OOM when allocating", r"OOM when allocating tensor with shape", "jax", "TensorFlow"),
    _head("o allocate memory [Op:", r"failed to allocate memory \[Op:\w{1,60}\]", "jax", "TensorFlow"),
    _head(
        "% of free system|% of system",
        r"Allocation of \d{1,20} exceeds \d{1,3}% of (?:free )?system memory\.? Killed\b",
        "system",
        "TensorFlow on the host",
    ),
    _head("Dst tensor is not", r"Dst tensor is not initialized", "jax", "copies of TensorFlow"),
    _head("Cannot allocate", r"Cannot allocate \d[\d.]{0,20}[KMG]?B memory on GPU \d{1,4}", "jax", "PaddlePaddle"),
    _head("Out of GPU memory", r"Out of GPU memory(?: trying to allocate \d[\d.]{0,20} [KMG]?i?B)?", "jax", "CUDA.jl"),
    _head("enough and alloc failed", r"memory isn't enough and alloc failed", "jax", "MindSpore"),
    _head("cudaMalloc retry failed", r"cudaMalloc retry failed: out of memory", "jax", "MXNet"),
    _head(
        "Not enough space to allocate", r"Not enough space to allocate \d{1,20} B \w{1,9} buffer", "jax", "Tenstorrent"
    ),
    _head("prefill tokens", r"Not enough memory to handle \d{1,12} prefill tokens", "cuda", "TGI"),
    _head("more system memory", r"model requires more system memory \(\d[\d.]{0,20} [KMG]i?B\)", "system", "Ollama"),
    _head("ErrorOutOfDeviceMemory", r"\bErrorOutOfDeviceMemory|VK_ERROR_OUT_OF_DEVICE_MEMORY", "jax", "Vulkan"),
    _head("memory in memory space", r"Ran out of memory in memory space (?:hbm|vmem|smem)", "xla", "XLA for TPU"),
    _head(
        "That was not possible",
        r"Attempting to (?:allocate|reserve) \d[\d.]{0,40}[KMG]\b.{0,40} That was not possible",
        "xla",
        "XLA",
    ),
    _head("Out of memory allocating", r"Out of memory allocating \d[\d,]{0,40} bytes", "cuda", "CuPy"),
    _head(
        "smaller than requested", r"Available memory of \d{1,20} is smaller than requested bytes of \d", "cuda", "ORT"
    ),
    _head(
        "requested buffer of size", r"Failed to allocate memory for requested buffer of size", "cuda", "ONNX Runtime"
    ),
    _head(
        "alloc failed: out of memory",
        r"allocating \d[\d.,]{0,20} MiB on device \d{1,4}: (?:cuda|hip)Malloc failed: out of memory",
        "cuda",
        "llama.cpp",
    ),
    _head(
        "buffer of size|allocate buffer|insufficient memory",
        r"ggml\S{1,80}: (?:failed to allocate (?:CPU\w{0,20} |\w{1,20}_Host |)buffer of size \d"
        r"|insufficient memory \(attempted to allocate)",
        "system",
        "llama.cpp on the host",
    ),
    _head(
        "buffer of size|allocate buffer|nable to allocate |Bytes of memory on device|buffer for kv|buffer for rs",
        r"(?:ggml|alloc)\S{1,80}: (?:error: )?failed to allocate (?:\w{1,20} buffer of size \d|buffer, size =)"
        r"|llama_\w{1,40}: failed to allocate buffer for (?:kv|rs) cache"
        r"|can't allocate \d{1,20} Bytes of memory on device"
        r"|unable to allocate (?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)\d{0,3} buffer",
        "cuda",
        "llama.cpp",
    ),
    _head(
        "of pinned memory",
        r"ggml\S{1,80}: failed to allocate \d[\d.,]{0,20} MiB of pinned memory",
        "system",
        "pinned memory of llama.cpp",
    ),
    _head(
        "context's memory pool",
        r"not enough space in the (?:context's memory pool|scratch memory pool) \(needed \d{1,20}, available \d",
        "system",
        "pools of llama.cpp",
    ),
    _head(
        "current device: |ggml-cuda.cu:",
        r"(?:CUDA|ROCm|HIP) error: out of memory current device: \d{1,4}, in function \w{1,80} at \S{0,300}ggml"
        r"|CUDA error 2 at \S{0,300}ggml-cuda\.cu:\d{1,6}: out of memory",
        "cuda",
        "llama.cpp",
    ),
    _head("Insufficient ", r"Insufficient (?:VRAM (?:for|in)|space in device allocation)", "cuda", "ExLlama"),
    _head(
        "alloc fail type|allocator fail type|ailed to cudaMalloc",
        r"StandardGpuResources: (?:Faiss device allocator|alloc) fail type|[Ff]ailed to cudaMalloc \d{1,20} bytes",
        "cuda driver",
        "Faiss",
    ),
    _head(
        "allocation error on worker|TOutOfMemoryError|stack_like_memory_pool|[CUDA] out of|CUDA error 2",
        r"Memory allocation error on worker \d{1,6}: (?:std::)?bad_alloc: cudaErrorMemoryAllocation"
        r"|NCudaLib::TOutOfMemoryError|stack_like_memory_pool\.h:\d{1,6}: Error: Out of memory"
        r"|catboost/cuda\S{1,200} CUDA error 2: out of memory|\[LightGBM\] \[Fatal\] \[CUDA\] out of memory",
        "cuda driver",
        "boosted trees",
    ),
    _head(
        "ALLOCATOR_FAILURE|bytes on device|CUDA allocation failed",
        r"NVJPEG_STATUS_ALLOCATOR_FAILURE|Critical error in pipeline:.{0,200}"
        r"(?:Can't allocate \d{1,20} bytes on device|CUDA allocation failed)",
        "cuda driver",
        "DALI",
    ),
    _head(
        "memory object allocation",
        r"\[GPU\] Exceeded max size of memory object allocation",
        "opencl",
        "OpenVINO",
    ),
    _head("NvMapMem", r"NvMapMemAllocInternalTagged: \d{1,12} error 12", "cuda", "Jetson"),
    _head("memory on device.", r"\bOut of memory on device\.", "cuda driver", "MATLAB"),
    _head("CUDA failed with error", r"CUDA failed with error out of memory", "cuda driver", "CTranslate2"),
    _head("CUDA failure 2", r"CUDA failure 2: out of memory ?;", "cuda driver", "ONNX Runtime"),
    _head("Gpu API call", r"\(-217:Gpu API call\) out of memory", "cuda driver", "OpenCV on a GPU"),
    _head(
        "use lower resolution",
        r"Not enough memory, use lower resolution \(max approx\. \d{1,6}x\d{1,6}\)",
        "cuda",
        "Stable Diffusion web UI",
    ),
    _head("dispatched on the CPU", r"[Ss]ome modules are dispatched on the CPU or the disk", "cuda", "device_map"),
    _head("available memory for the cache", r"No available memory for the cache blocks", "cuda", "vLLM"),
    _head(
        "KV cache memory", r"KV cache is needed, which is larger than the available KV cache memory", "cuda", "KV cache"
    ),
    _head(
        "can be stored in KV cache",
        r"is larger than the maximum number of tokens that can be stored in KV cache",
        "cuda",
        "KV cache",
    ),
    _head("in memory profiling", r"Error in memory profiling\. Initial free memory", "cuda", "vLLM's start"),
    _head("capacity is unbalanced", r"The memory capacity is unbalanced", "cuda", "SGLang's start"),
    _head(
        "Free memory on device",
        r"Free memory on device \S{0,20}\([\d.]{1,20}/[\d.]{1,20} GiB\)",
        "cuda",
        "vLLM's start",
    ),
    _head(
        "mem-fraction-static",
        r"Not enough memory\. Please try to (?:in|de)crease --mem-fraction-static",
        "cuda",
        "SGLang",
    ),
    _head("skipping batch", r"ran out of memory(?: on GPU #\d{1,4})?, skipping batch", "cuda", "fairseq"),
    _head(
        "OOM during optimization",
        r"OOM during optimization, irrecoverable",
        "cuda",
        "fairseq's optimizer",
    ),
    _head("OutOfMemoryError in Task", r"CUDA OutOfMemoryError in TaskAlignedAssigner", "cuda", "Ultralytics"),
    _head(
        "retrying with tiled",
        r"Ran out of memory when regular VAE (?:en|de)coding, retrying with tiled",
        "cuda",
        "ComfyUI",
    ),
    # host memory of programs beside torch
    _head(
        "killed by YARN", r"[Cc]ontainer killed by YARN for exceeding (?:physical |virtual )?memory", "system", "YARN"
    ),
    _head(
        "java.lang.OutOfMemoryError",
        r"java\.lang\.OutOfMemoryError: (?:Java heap|GC overhead)",
        "system",
        "Java's heap",
    ),
    _head(
        "java.lang.OutOfMemoryError",
        r"java\.lang\.OutOfMemoryError: (?:Metaspace|Compressed class|(?:Cannot reserve .{1,60})?[Dd]irect buffer)",
        "system",
        "Java beside its heap",
    ),
    _head(
        "avaScript heap out|ERR_WORKER_OUT_OF_MEMORY",
        r"JavaScript heap out of memory|ERR_WORKER_OUT_OF_MEMORY",
        "system",
        "Node.js",
    ),
    _head("Out of Memory Error: ", r"Out of Memory Error: (?:failed to|could not) \w{1,20}", "system", "DuckDB"),
    _head(
        "abruptly|unexpectedly terminated|background ",
        r"One of the subprocesses has abruptly died during map|A process in the process pool was terminated abruptly"
        r"|[Oo]ne or more background workers are no longer alive|[Ss]ome background worker is 6 feet under"
        r"|A worker process managed by the executor was unexpectedly terminated",
        "system",
        "pools of processes",
        certain=False,
    ),
    _head(
        "alloc of size|C error: out|runtime: out of|vector of size",
        r"ArrowMemoryError: (?:m|re)alloc of size \d|C error: out of memory|fatal error: runtime: out of memory"
        r"|cannot allocate vector of size \d",
        "system",
        "libraries on the host",
    ),
    _head(
        "worker exited unexpectedly|containers exceeding thresholds|possible container OOM|ExecutorLostFailure",
        r"Python worker exited unexpectedly \(crashed\)|Likely due to containers exceeding thresholds"
        r"|exited with exit code 137\(SIGKILL, possible container OOM\)"
        r"|ExecutorLostFailure \(.{1,400}Exit (?:status|code)(?: is|:) 137",
        "system",
        "Spark's workers",
        certain=False,
    ),
    _head("sent SIGKILL!", r"Worker \(pid:\d{1,10}\) was sent SIGKILL!", "system", "gunicorn", certain=False),
    _head("fork: ", rf"\bfork: (?:retry: )?{_ENOMEM}", "system", "fork"),
    _head(
        "start new thread|native thread|emporarily unavailable",
        r"can't start new thread|java\.lang\.OutOfMemoryError: unable to create (?:new )?native thread"
        r"|(?:pthread_create failed.{0,60}|Thread creation failed|\bfork(?:: retry)?): Resource temporarily unavail",
        "system",
        "threads and processes",
    ),
    # services that end a program at its memory limit
    _head(
        "out-of-memory and exited|emory limit |emory quota|Max Memory Used|Ran out of|over its resource|OOM killed",
        r"ran out-of-memory and exited with|Ran out of memory \(used over \d{1,6}[KMG]B\) while running your code"
        r"|app has gone over its resource limits|Process appears to have been OOM killed"
        r"|Memory limit of [\d.]{1,20} ?[KMG]i?B exceeded"
        r"|Memory limit exceeded \(\d{1,10}[KMG]i?\)|Error R1[45] \(Memory quota|hit its memory limit"
        r"|Memory Size: (\d{1,6}) MB Max Memory Used: \1 MB",
        "system",
        "a service's limit",
    ),
    _head("workers died while", r"all those workers died while running it", "system", "Dask's workers", certain=False),
    _head("memory allocation of", r"memory allocation of \d{1,20} bytes failed", "system", "libraries on the host"),
    _head("Memory exhausted!", r"\[LightGBM\] \[Fatal\] Memory exhausted!", "system", "libraries on the host"),
    _head(
        "Insufficient memory",
        r"\(-4:Insufficient memory\) Failed to allocate \d{1,20} bytes",
        "system",
        "libraries on the host",
    ),
    # the driver, called by torch or by a library outside torch's allocator
    _head("udaHost|cuMemHost", r"\bcu(?:daHost|MemHost)(?:Register|Alloc)\b" + _REFUSED, "cuda driver", "CUDA"),
    _head("hipHost|hipMemHost", r"\bhip(?:Host|MemHost)(?:Register|Alloc|Malloc)\b" + _REFUSED, "hip driver", "ROCm"),
    _head(
        "pinned host memory|bytes on host: ",
        r"could not allocate pinned host memory of size"
        r"|failed to alloc \d{1,20} bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        "cuda driver",
        "TensorFlow, pinned memory",
    ),
    _head("CudaError: out of memory", r"\bCudaError: out of memory \(2\)", "cuda driver", "torch 1.0 and later"),
    _head("Error out of memory at line", r"Error out of memory at line \d{1,6} in file", "cuda driver", "bitsandbytes"),
    _head(
        "nvinfer1::|Cuda Runtime (out|OutOfMemory (no|amount of GPU memory|User allocator error",
        r"Cuda Error in nvinfer1::\S{1,100}: 2 \(out of memory\)"
        r"|Error Code \d{1,3}: (?:Cuda Runtime \(out of memory\)|OutOfMemory \(no further)"
        r"|User allocator error allocating \d{1,20}-byte buffer"
        r"|Requested amount of GPU memory \(\d{1,20} bytes\) could not be allocated",
        "cuda driver",
        "TensorRT",
    ),
    _head(
        "insufficient to use tactic|Skipping tactic",
        r"Device memory is insufficient to use tactic|Skipping tactic \d{1,9} due to insuff?icient memory",
        "cuda driver",
        "tactics of TensorRT",
        certain=False,
    ),
    _head(
        "bad_alloc: |RMM_ERROR_OUT",
        r"std::bad_alloc: (?:out_of_memory: )?(?:CUDA|RMM)\b|RMM_ERROR_OUT_OF_MEMORY",
        "cuda driver",
        "RAPIDS",
    ),
    _head(
        "[TensorRT-LLM]",
        r"\[TensorRT-LLM\].{0,200}CUDA runtime error in \S{1,60}Malloc\w{0,10}\([^\n]{0,100}\): out of memory",
        "cuda driver",
        "TensorRT-LLM",
    ),
    _head("[TM]", r"\[TM\]\[ERROR\] .{0,40}CUDA runtime error: out of memory", "cuda driver", "LMDeploy"),
    _head(
        "numba.cuda", r"numba\.cuda\.cudadrv\.\S{1,60}: \[2\] Call to cuMem\w{1,30} results in", "cuda driver", "Numba"
    ),
    _head(
        "alloc(|alloc failed",
        r"cu(?:da)?\w{0,20}[Aa]lloc\w{0,20}(?:\([^)\n]{0,200}\))? failed: out of memory",
        "cuda driver",
        "CUDA",
    ),
    _head(
        "alloc(|alloc failed",
        r"hip\w{0,20}[Mm]alloc\w{0,20}(?:\([^)\n]{0,200}\))? failed: out of memory",
        "hip driver",
        "ROCm",
    ),
    _head("Failed to CUDA", r"Failed to CUDA (?:host )?\w?[ac]l?loc\w{0,10}(?: async)? \d{1,20} bytes", "nccl", "NCCL"),
    _head(
        "cuda runtime error",
        r"cuda runtime error \(2\) ?: out of memory(?: at \S{0,200}THC(?:Storage|Tensor|CachingAllocator)\S{0,80})",
        "cuda",
        "torch 0.4",
    ),
    _head("cuda runtime error", r"cuda runtime error \(2\) ?: out of memory", "cuda driver", "torch 0.4"),
    _head("out of memory", r"Triton Error \[(CUDA|HIP)\]:.{0,40} out of memory", "", "Triton"),
    _head("out of resource: ", r"out of resource: [\w ]{1,120},? Required: \d", "triton", "Triton's shared memory"),
    _head(
        "driver error: out of memory",
        r"CUDA driver error: out of memory",
        "cuda driver",
        "CUDA driver API, torch 2.1 and later",
    ),
    _head(
        "ut of memory",
        r"CUDA (?:runtime )?[Ee]rror: [Oo]ut of memory|CUDA Error 2,? out of memory"
        r"|== cudaSuccess(?: \(2 vs\. 0\) | \|\| .{1,80}: CUDA: )out of memory",
        "cuda driver",
        "torch 1.0 and later",
    ),
    _head("out of memory", r"HIP (?:driver |runtime )?error: out of memory", "hip driver", "torch for ROCm"),
    _head(
        "CUDA_ERROR_OUT|cudaErrorMemory",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "cuda driver",
        "CUDA",
    ),
    _head("hipErrorOutOfMemory|hipErrorMemory", r"hipError(?:OutOfMemory|MemoryAllocation)", "hip driver", "ROCm"),
    _head("HSA_STATUS_ERROR_OUT", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES", "hip driver", "ROCm"),
    _head(
        "EL0004|ACL_ERROR_RT_MEM|207001",
        r"EL0004: Failed to allocate memory|ACL_ERROR_RT_MEMORY_ALLOCATION|error code is 207001",
        "npu driver",
        "CANN",
    ),
    _head(
        "device not ready", r"CUDA driver error: device not ready", "cuda driver", "torch 2.1 and later", certain=False
    ),
    _head(
        "_ERROR_OUT|CL_OUT_OF|CL_MEM_OBJECT",
        r"(?:UR|ZE|PI)(?:_RESULT)?_ERROR_OUT_OF_(?:DEVICE_|HOST_)?(?:MEMORY|RESOURCES)"
        r"|CL_OUT_OF_(?:RESOURCES|HOST_MEMORY)|CL_MEM_OBJECT_ALLOCATION_FAILURE",
        "xpu driver",
        "oneAPI",
    ),
    _head("Native API failed", r"Native API failed.{0,80}OUT_OF_RESOURCES", "xpu driver", "oneAPI", certain=False),
    _head(
        "invalid configuration argument|too many resources",
        r"(?:CUDA|HIP) error: (?:invalid configuration argument|too many resources requested for launch)",
        "cuda",
        "limits of a launch",
    ),
    _head("_STATUS_ALLOC_FAILED", r"\b(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED", "", "CUDA libraries"),
    _head("CURAND_STATUS_ALLOC", r"CURAND_STATUS_ALLOCATION_FAILED", "curand", "CUDA libraries"),
    _head("_STATUS_ALLOC_FAILED", r"\b(HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED", "", "ROCm libraries"),
    _head("DEVICE_ALLOCATION_FAILED", r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cudnn", "cuDNN 9"),
    _head("HOST_ALLOCATION_FAILED", r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "cpu", "cuDNN 9"),
    _head(
        "insufficient resources|INSUFFICIENT_RESOURCES",
        r"insufficient resources when calling .cusparse|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        "cusparse",
        "CUDA libraries",
    ),
    _head("miopenStatusAllocFailed", r"miopenStatusAllocFailed", "miopen", "ROCm libraries"),
    _head("CUFFT_ALLOC_FAILED", r"CUFFT_ALLOC_FAILED", "cufft", "CUDA libraries"),
    _head(
        "_STATUS_NOT_INITIALIZED",
        r"\b(CUBLAS|CUDNN|CUSOLVER)_STATUS_NOT_INITIALIZED",
        "",
        "CUDA libraries",
        certain=False,
    ),
    _head(
        "valid cuDNN algorithm", r"Unable to find a valid cuDNN algorithm", "cudnn", "torch 1.8 to 1.13", certain=False
    ),
    _head(
        "unable to find an engine",
        r"(?:FIND|GET) was unable to find an engine to execute",
        "cudnn",
        "torch 2.0 and later",
        certain=False,
    ),
    _head("uda failure", r"Cuda failure (?:2 )?'out of memory'", "nccl", "NCCL"),
    _head("ip failure", r"HIP failure (?:2 )?'out of memory'", "rccl", "RCCL"),
    _head(
        "INTERNAL ASSERT FAILED",
        r"handles_\.at\(i\) INTERNAL ASSERT FAILED",
        "cuda",
        "torch 2.1 and later",
        certain=False,
    ),
    # host memory
    _head(
        "for an array with shape",
        r"Unable to allocate \d[\d.]{0,40} (?:bytes|[KMGTPE]iB) for an array with shape",
        "numpy",
        "NumPy 1.17 and later",
    ),
    _head("allocate array with shape", r"Unable to allocate array with shape", "numpy", "NumPy 1.16"),
    _head(
        "unable to mmap",
        r"unable to mmap \d{1,40} bytes from file(?: <[^>]{0,4096}>: Cannot allocate memory)?",
        "cpu",
        "torch 1.0 and later",
    ),
    _head(
        "Too many open files",
        r"unable to open shared memory object .{0,300}Too many open files",
        "system",
        "open files",
    ),
    _head("Too many open files", r"\[Errno 24\] Too many open files", "system", "open files"),
    _head("received 0 items", r"received 0 items of ancdata", "system", "open files"),
    _head(
        "DataLoader worker",
        r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: Bus error",
        "shared memory",
        _SHM,
    ),
    _head(
        "bus error|Bus error|unable to write to file </torch_",
        r"Unexpected bus error encountered in worker|unable to write to file </torch_\w{1,60}>(?!:)",
        "shared memory",
        _SHM,
    ),
    _head("Bus error (core", r"\bBus error \(core dumped\)", "shared memory", _SHM, certain=False),
    _head(
        "No space left",
        r"unable to (?:write to|open|allocate|resize) (?:file|shared memory)[^:]{0,300}: No space left",
        "shared memory",
        _SHM,
    ),
    _head(
        "No space left",
        r"\[Errno 28\] No space left on device: '/?(?:dev/shm|pym-|psm_|torch_)",
        "shared memory",
        _SHM,
    ),
    _head("No space left", r"\[Errno 28\] No space left on device: '(?!/?dev/shm)", "disk", "a full disk"),
    _head("[Errno 28]", r"\[Errno 28\] No space left on device", "shared memory", "Errno 28", certain=False),
    _head("shared memory segment", r"[Ee]rror while creating shared memory segment", "shared memory", _SHM),
    _head("/dev/shm/nccl", r"failed to extend /dev/shm/nccl", "shared memory", _SHM),
    _head("shared memory(shm)", r"unable to allocate shared memory\(shm\) for file", "shared memory", _SHM),
    _head("Pin memory thread", r"Pin memory thread exited unexpectedly(?!\")", "system", "pinning", certain=False),
    _head(
        "DataLoader worker", r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: Killed", "system", "DataLoader"
    ),
    _head(
        "exited unexpectedly",
        r"DataLoader worker \(pid.{0,100}\) exited unexpectedly",
        "system",
        "DataLoader",
        certain=False,
    ),
    _head(
        "virtual memory condition|0xC00000|0xc00000|0xC000012|0xc000012|os error 1455|"
        "WinError|aging file|file di paging|pagina|Auslagerungsdatei|页面文件|ページング|페이징|подкачки",
        r"diagnosed a low virtual memory condition|\b0x[Cc]000(?:0017|012[Dd])\b"
        r"|\[?WinError (?:1455|1450|8)\]|\bos error 1455\b|WinError 1455|[Pp]aging file is too small"
        r"|Auslagerungsdatei ist zu klein|fichier de pagination est insuffisant|archivo de paginación es demasiado"
        r"|arquivo de paginação é muito|file di paging|页面文件太小|ページング ?ファイルが小さ|페이징 파일이 너무"
        r"|[Фф]айл подкачки слишком",
        "system",
        "Windows",
    ),
    # programs that end a process for its memory, or report its end
    _head("System OOM", r"System OOM encountered, victim process: \S", "system", "Kubernetes, the node"),
    _head("low on resource", r"node was low on resource: memory", "system", "Kubernetes, the node"),
    _head(
        "lost communication",
        r"(?:hosted|self-hosted) runner(?:: .{1,100}?)? lost communication with the server",
        "system",
        "GitHub Actions",
        certain=False,
    ),
    _head("OutOfMemoryError()", r"\bOutOfMemoryError\(\)", "system", "Julia"),
    _head("instance type with more memory", r"use an instance type with more memory", "system", "SageMaker"),
    _head("% memory budget", r"[Ww]orker .{0,80}exceeded \d{1,3}% memory budget", "system", "Dask"),
    _head(
        "terminated program|died due to signal 9",
        r"Killed signal terminated program \w{1,40}|'\w{1,40}' died due to signal 9\b",
        "system",
        "a compiler",
    ),
    _head("ninja: build", r"\bKilled ninja: build stopped", "system", "a compiler", certain=False),
    _head("OOMKilled", r"\bOOMKilled\b(?!\W{1,6}(?:[Ff]alse|0|null|None))", "system", "Kubernetes"),
    _head("all available RAM", r"crashed after using all available RAM", "system", "Colab"),
    _head(
        "tried to allocate more memory", r"notebook tried to allocate more memory than is available", "system", "Kaggle"
    ),
    _head(
        "appears to have died|ernel crashed while|ernel died|Dead kernel|DeadKernel|KernelRestarter|is unresponsive",
        r"[Kk]ernel (?:for .{1,200}? )?(?:appears to have died|crashed while executing|died unexpectedly"
        r"|died with exit code|died, restarting)|Dead kernel|DeadKernelError|KernelRestarter: restarting kernel"
        r"|Python kernel is unresponsive",
        "system",
        "Jupyter",
        certain=False,
    ),
    _head(
        "slurmstepd|srun:|OUT_OF_ME|exceeded",
        r"slurmstepd: error: .{0,120}oom[-_ ]kill|srun: error: .{0,120}: Out Of Memory|\bOUT_OF_ME(?:MORY|\+)"
        r"|slurmstepd: error: .{0,120}[Ee]xceeded (?:job |step |virtual )?memory limit",
        "system",
        "Slurm",
    ),
    _head(
        "PBS: job killed|mem limit reached",
        r"PBS: job killed: (?:p?v?mem|vmem)\b|exceeded its memory allocation: cgroup mem",
        "system",
        "PBS",
    ),
    _head("TERM_MEMLIMIT", r"TERM_MEMLIMIT", "system", "LSF"),
    _head("h_vmem", r"exceeds? job (?:hard|soft) limit .h_vmem", "system", "SGE"),
    _head("over memory limit|over cgroup", r"Job has gone over (?:cgroup )?memory limit", "system", "HTCondor"),
    _head("exceeded request_memory", r"memory usage exceeded request_memory", "system", "HTCondor"),
    _head("Container killed due", r"Container killed due to memory usage", "system", "AWS Batch"),
    _head(
        "running low on memory|due to memory pressure",
        r"killed due to (?:the node running low on memory|memory pressure)",
        "system",
        "Ray",
    ),
    _head("ObjectStoreFull|object store", r"ObjectStoreFullError", "shared memory", "Ray's object store"),
    _head(
        "No executable batch size", r"No executable batch size found, reached zero", "cuda", "accelerate", certain=False
    ),
    _head("due to CUDA OOM", r"to CPU due to CUDA OOM", "cuda", "detectron2"),
    _head("emory cgroup out of", r"[Mm]emory cgroup out of memory", "system", "a control group"),
    _head("ut of memory", r"[Oo]ut of memory: Killed? process \d", "system", "Linux"),
    _head(
        "oom-kill|oom_kill|OOM Killed|OOM killed|OOM-killed|oom_reaper: ",
        r"oom-kill|oom_kill event|OOM [Kk]illed|OOM-killed|oom_reaper: reaped process",
        "system",
        "Linux",
    ),
    _head("systemd-oomd", r"systemd-oomd.{0,40}: Killed .{1,300}? due to memory", "system", "a memory daemon"),
    _head(
        "memorystatus|low swap: killing|application memory",
        r"memorystatus: killing.{0,40} (?:process|pid) |low swap: killing .{0,60} pid \d"
        r"|system has run out of application memory",
        "system",
        "macOS",
    ),
    _head("oom_kill ", r"\boom_kill[ =:]{1,3}[1-9]\d{0,9}\b", "system", "memory.events"),
    _head("by the OOM killer", r"killed by the OOM killer", "system", "Linux"),
    _head("sending SIG", r"earlyoom.{0,40}: sending SIG(?:TERM|KILL) to process", "system", "a memory daemon"),
    _head(
        "xit|rror 137|return code|status code|returncode|statuscode|SIGKILL|illed|signal 9",
        r"[Ee]xit(?:ed with)?(?: status| ?_?[Cc]ode)?\"?[:=]* *137\b|[Ee]rror 137\b"
        r"|\b[Ee]xit ?_?[Cc]ode\"? *[:=]? *-9\b|Signal 9 \(SIGKILL\)|Signals\.SIGKILL|(?:return|status) code:? 137\b"
        r"|(?:return|status|exit) ?code *[:=]? *-9\b|non-zero exit \(137\)|\bExited \(137\)|\bSIGKILL\b"
        r"|(?:terminated|killed) by signal 9\b|exited on signal 9\b|signal: killed\b|Received \"killed\" signal"
        r"|(?:^| )Killed$|\b\d{1,40} Killed\b|zsh: killed\b",
        "system",
        _SHELLS,
        certain=False,
    ),
    _head(
        "mlock|ibv_reg|RLIMIT_MEMLOCK",
        r"(?:failed to mlock|\bmlock(?:all)? failed|ibv_(?:reg|create)_\w{1,20} failed)"
        r"[^\n]{0,100}Cannot allocate memory",
        "system",
        "locked memory",
    ),
    _head(
        _KILLED,
        rf"(?:^| \d{{1,9}} )(?:{'|'.join(map(re.escape, _KILLED.split('|')))})(?=$| )",
        "system",
        _SHELLS,
        certain=False,
    ),
    _head("[Errno 12]", rf"\[Errno 12\](?: {_ENOMEM})?", "cpu", "the operating system"),
    _head("Cannot allocate memory", r"Cannot allocate memory", "cpu", "the operating system"),
    _head(
        "std::bad_alloc|: bad allocation",
        r"std::bad_alloc(?!: (?:out_of_memory: )?(?:CUDA|RMM|cuda))|: bad allocation\b",
        "cpu",
        "C++",
    ),
    _head("MemoryError", r"\bMemoryError\b(?!: (?:Unable to allocate|std::bad_alloc))", "cpu", "Python"),
)
"""Heads of messages. If several match at the same place, the first one wins."""
