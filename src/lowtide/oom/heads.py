"""The first words of every out-of-memory message that Lowtide knows."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Head:
    """How a message begins, and who says it. `kind` is "" where the first group of the pattern says it."""

    pattern: re.Pattern[str]
    kind: str
    form: str = ""
    certain: bool = True


def _head(pattern: str, kind: str, form: str = "", *, certain: bool = True) -> Head:
    return Head(re.compile(pattern), kind, form, certain)


HEADS = (
    # Allocators of torch that say numbers.
    _head(r"\b(CUDA|HIP|XPU|NPU|MUSA|GCU|MLU|HPU) out of memory\b", ""),
    _head(r"MPS backend out of memory", "mps", "torch 1.13 and later"),
    _head(r"Invalid buffer size: \d[\d.]* ?[KMGT]i?B", "mps", "Metal"),
    _head(
        r"Default(?:Mobile)?CPUAllocator: (?:can't allocate|not enough) memory"
        r"(?:: you tried to allocate \d+ bytes\. Error code 12 \(Cannot allocate memory\))?",
        "cpu",
        "torch 1.0 and later",
    ),
    _head(r"enforce fail at .{0,40}CPUAllocator\.cpp:\d+\] posix_memalign", "cpu", "torch 1.0"),
    _head(r"\$ Torch: not enough memory", "cpu", "torch 0.4"),
    _head(r"C10 Out of Memory", "cpu", "torch, mobile"),
    # The driver, asked by torch or by a library outside of torch's allocator.
    _head(r"cuda runtime error \(2\) ?: out of memory", "cuda driver", "torch 0.4"),
    _head(r"CUDA (?:driver |runtime )?error: out of memory", "cuda driver", "torch 1.0 and later"),
    _head(r"HIP (?:driver |runtime )?error: out of memory", "hip driver", "torch for ROCm"),
    _head(r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation", "cuda driver", "CUDA"),
    _head(r"CUDA driver error: device not ready", "cuda driver", "torch 2.1 and later", certain=False),
    _head(r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_|HOST_)?(?:MEMORY|RESOURCES)", "xpu driver", "oneAPI"),
    _head(r"Native API failed.{0,80}OUT_OF_RESOURCES", "xpu driver", "oneAPI", certain=False),
    _head(r"\b(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED", "", "CUDA libraries"),
    _head(r"\b(HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED", "", "ROCm libraries"),
    _head(r"CUFFT_ALLOC_FAILED", "cufft", "CUDA libraries"),
    _head(r"\b(CUBLAS|CUDNN|CUSOLVER)_STATUS_NOT_INITIALIZED", "", "CUDA libraries", certain=False),
    _head(r"Unable to find a valid cuDNN algorithm", "cudnn", "torch 1.8 to 1.13", certain=False),
    _head(r"(?:FIND|GET) was unable to find an engine to execute", "cudnn", "torch 2.0 and later", certain=False),
    _head(r"Cuda failure (?:2 )?'out of memory'", "nccl", "NCCL"),
    _head(r"handles_\.at\(i\) INTERNAL ASSERT FAILED", "cuda", "torch 2.1 and later", certain=False),
    # The host.
    _head(r"Unable to allocate \d[\d.]* (?:bytes|[KMGTP]iB) for an array with shape", "numpy", "NumPy 1.17 and later"),
    _head(r"unable to mmap \d+ bytes from file(?: <[^>]*>: Cannot allocate memory)?", "cpu", "torch 1.0 and later"),
    _head(r"DataLoader worker \(pid[^)]*\) is killed by signal: Bus error", "shared memory", "torch 0.4 and later"),
    _head(r"unable to (?:write to|open|allocate) (?:file|shared memory)[^:]{0,80}: No space left", "shared memory"),
    _head(r"DataLoader worker \(pid[^)]*\) is killed by signal: Killed", "system", "torch 0.4 and later"),
    _head(r"[Oo]ut of memory: Killed? process \d+|Memory cgroup out of memory", "system", "Linux"),
    _head(r"oom-kill|oom_kill event|OOM Killed", "system", "Linux"),
    _head(
        r"[Ee]xit(?:ed with)?(?: status| ?[Cc]ode)?:? *137\b|\bexitcode *: *-9\b|Signal 9 \(SIGKILL\)|Signals\.SIGKILL"
        r"|(?:^| )Killed$|\b\d+ Killed\b|zsh: killed\b",
        "system",
        "shells, torchrun and containers",
        certain=False,
    ),
    _head(r"Cannot allocate memory", "cpu", "the operating system"),
    _head(r"std::bad_alloc", "cpu", "C++"),
    _head(r"\bMemoryError\b(?!: Unable to allocate)", "cpu", "Python"),
)
"""In case of a tie the first wins."""
