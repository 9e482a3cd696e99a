"""The first words of every out-of-memory message that Lowtide knows."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageHead:
    """How a message begins, and who says it. `kind` is "" where the first group of the pattern says it.

    No pattern matches more characters than `stream.LONGEST`.
    """

    words: tuple[str, ...]
    """Every match of the pattern has one of them."""
    pattern: re.Pattern[str]
    kind: str
    form: str = ""
    certain: bool = True


def _head(words: str, pattern: str, kind: str, form: str = "", *, certain: bool = True) -> MessageHead:
    return MessageHead(tuple(words.split("|")), re.compile(pattern), kind, form, certain)


HEADS = (
    # Allocators of torch that say numbers.
    _head("out of memory", r"\b(CUDA|HIP|XPU|NPU|MUSA|GCU|MLU|HPU) out of memory\b", ""),
    _head("out of memory", r"MPS backend out of memory", "mps", "torch 1.13 and later"),
    _head("Invalid buffer size", r"Invalid buffer size: \d[\d.]{0,40} ?[KMGT]i?B", "mps", "Metal"),
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
    # The driver, asked by torch or by a library outside of torch's allocator.
    _head("cuda runtime error", r"cuda runtime error \(2\) ?: out of memory", "cuda driver", "torch 0.4"),
    _head("out of memory", r"CUDA (?:driver |runtime )?error: out of memory", "cuda driver", "torch 1.0 and later"),
    _head("out of memory", r"HIP (?:driver |runtime )?error: out of memory", "hip driver", "torch for ROCm"),
    _head(
        "CUDA_ERROR_OUT|cudaErrorMemory", r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation", "cuda driver", "CUDA"
    ),
    _head(
        "device not ready", r"CUDA driver error: device not ready", "cuda driver", "torch 2.1 and later", certain=False
    ),
    _head(
        "UR_RESULT_ERROR_OUT", r"UR_RESULT_ERROR_OUT_OF_(?:DEVICE_|HOST_)?(?:MEMORY|RESOURCES)", "xpu driver", "oneAPI"
    ),
    _head("Native API failed", r"Native API failed.{0,80}OUT_OF_RESOURCES", "xpu driver", "oneAPI", certain=False),
    _head("_STATUS_ALLOC_FAILED", r"\b(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_ALLOC_FAILED", "", "CUDA libraries"),
    _head("_STATUS_ALLOC_FAILED", r"\b(HIPBLAS|ROCBLAS|MIOPEN)_STATUS_ALLOC_FAILED", "", "ROCm libraries"),
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
    _head("Cuda failure", r"Cuda failure (?:2 )?'out of memory'", "nccl", "NCCL"),
    _head(
        "INTERNAL ASSERT FAILED",
        r"handles_\.at\(i\) INTERNAL ASSERT FAILED",
        "cuda",
        "torch 2.1 and later",
        certain=False,
    ),
    # The host.
    _head(
        "for an array with shape",
        r"Unable to allocate \d[\d.]{0,40} (?:bytes|[KMGTP]iB) for an array with shape",
        "numpy",
        "NumPy 1.17 and later",
    ),
    _head(
        "unable to mmap",
        r"unable to mmap \d{1,40} bytes from file(?: <[^>]{0,4096}>: Cannot allocate memory)?",
        "cpu",
        "torch 1.0 and later",
    ),
    _head(
        "DataLoader worker",
        r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: Bus error",
        "shared memory",
        "torch 0.4 and later",
    ),
    _head(
        "No space left",
        r"unable to (?:write to|open|allocate) (?:file|shared memory)[^:]{0,80}: No space left",
        "shared memory",
    ),
    _head(
        "DataLoader worker",
        r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: Killed",
        "system",
        "torch 0.4 and later",
    ),
    _head("ut of memory", r"[Oo]ut of memory: Killed? process \d|Memory cgroup out of memory", "system", "Linux"),
    _head("oom-kill|oom_kill|OOM Killed", r"oom-kill|oom_kill event|OOM Killed", "system", "Linux"),
    _head(
        "137|exitcode|SIGKILL|illed",
        r"[Ee]xit(?:ed with)?(?: status| ?[Cc]ode)?:? *137\b|\bexitcode *: *-9\b|Signal 9 \(SIGKILL\)|Signals\.SIGKILL"
        r"|(?:^| )Killed$|\b\d{1,40} Killed\b|zsh: killed\b",
        "system",
        "shells, torchrun and containers",
        certain=False,
    ),
    _head("Cannot allocate memory", r"Cannot allocate memory", "cpu", "the operating system"),
    _head("std::bad_alloc", r"std::bad_alloc", "cpu", "C++"),
    _head("MemoryError", r"\bMemoryError\b(?!: Unable to allocate)", "cpu", "Python"),
)
"""In case of a tie the first wins."""
