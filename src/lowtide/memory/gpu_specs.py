"""A table of GPUs, to plan for them on a machine that has none.

`total_bytes` is torch's `total_memory`: the part of the nominal size that the driver leaves. Drivers differ in it by
up to 1 %, and error correction, where it can be turned on, takes more: each number is the smallest reported one, not
that of a lucky machine. The CUDA context of each process is taken from it too.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.errors import BudgetError, LowtideError
from lowtide.utils.amounts import parse_bytes

_KIB = 2**10
_DEVICE_QUERY = "output of NVIDIA's deviceQuery, driver for CUDA {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One kind of GPU. `capability` is its compute capability; None for a GPU of which only the size is known."""

    name: str
    total_bytes: int
    capability: tuple[int, int] | None
    source: str

    def cublas_workspace_bytes(self, environment: Mapping[str, str] = os.environ) -> int | None:
        """Return the workspace of each cuBLAS handle; see the function. None if the capability is not known."""
        return None if self.capability is None else cublas_workspace_bytes(self.capability, environment)


def _gpu(name: str, total_bytes: int, capability: tuple[int, int], source: str) -> GpuSpec:
    return GpuSpec(name=name, total_bytes=total_bytes, capability=capability, source=source)


GPUS: tuple[GpuSpec, ...] = (
    _gpu("RTX 4060", 8_318_222_336, (8, 9), "total_memory in the artefact of xMem (Middleware 2025)"),
    _gpu("RTX 3060", 12_587_106_304, (8, 6), _DEVICE_QUERY.format("12.4")),
    _gpu("T4", 15_642_329_088, (7, 5), _DEVICE_QUERY.format("12.5")),
    _gpu("V100-16", 16_911_433_728, (7, 0), _DEVICE_QUERY.format("11.0")),
    _gpu("L4", 23_583_784_960, (8, 9), "deviceQuery in github.com/bottlerocket-os/bottlerocket-kernel-kit/pull/139"),
    _gpu("RTX 4090", 25_250_627_584, (8, 9), _DEVICE_QUERY.format("13.0")),
    _gpu("RTX 3090", 25_414_860_800, (8, 6), _DEVICE_QUERY.format("12.1")),
    _gpu("RTX 5090", 33_660_534_784, (12, 0), _DEVICE_QUERY.format("13.0")),
    _gpu("A100-40", 42_298_834_944, (8, 0), "deviceQuery in github.com/bottlerocket-os/bottlerocket/pull/3873"),
    _gpu("L40S", 47_576_711_168, (8, 9), _DEVICE_QUERY.format("12.4")),
    _gpu("RTX A6000", 51_160_023_040, (8, 6), _DEVICE_QUERY.format("12.7")),
    _gpu("A100-80", 84_974_239_744, (8, 0), _DEVICE_QUERY.format("12.4") + " (PCIe; the SXM4 has a little more)"),
    _gpu("H100-80", 85_017_755_648, (9, 0), _DEVICE_QUERY.format("13.0")),
    _gpu("H200-141", 143_156 * 2**20, (9, 0), "torch.cuda.get_device_properties, in whole MiB"),
)
"""Known GPUs, the smallest first."""


def context_bytes(gpu: GpuSpec) -> tuple[int, int]:
    """Return the least and the most bytes that a CUDA context, library handles and loaded kernels take of a GPU.

    They are not the allocator's. Reported are 287 MB if kernels are loaded lazily and 667 MB if not
    (github.com/pytorch/pytorch/issues/86509), about 300 MB (107667) and 400 MB (109888), and 426 MiB on an RTX 6000 Ada
    (github.com/unslothai/unsloth-zoo/issues/1053); it grows with the GPU's multiprocessors and differs by driver.
    """
    return 250 * 2**20, 700 * 2**20


_SHORTEST = 3
"""Least letters and digits of a part of a name that stands for all of it: "cuda:5" is no RTX 5090."""


def parse_gpu(text: str | GpuSpec) -> GpuSpec:
    """Return the GPU that is named by "cuda:24GiB", "RTX 4090", "a100-80", "cuda:H100" or a GPU's full name.

    Raises LowtideError, naming the nearest GPUs, for names that match none or several, and for invalid sizes.
    """
    if isinstance(text, GpuSpec):
        return text
    wanted = text.strip()
    if wanted.lower().startswith("cuda:"):
        wanted = wanted[len("cuda:") :]
        try:
            n_bytes = parse_bytes(wanted)
        except BudgetError:
            pass
        else:
            return GpuSpec(
                name=f"cuda:{wanted}", total_bytes=n_bytes, capability=None, source="the size that was given"
            )
    key = _key(wanted)
    by_key = {_key(gpu.name): gpu for gpu in GPUS}
    if key in by_key:
        return by_key[key]
    close = [gpu for known, gpu in by_key.items() if len(key) >= _SHORTEST and known.startswith((key, f"rtx{key}"))]
    if len(close) == 1:
        return close[0]
    near = close or [by_key[known] for known in difflib.get_close_matches(key, by_key, n=3, cutoff=0.5)] or list(GPUS)
    matches = "several GPUs" if close else "no GPU that is known"
    raise LowtideError(
        f"{text!r} is the name of {matches}.\n"
        f"  {'Nearest' if len(near) < len(GPUS) else 'Known'}: {', '.join(gpu.name for gpu in near)}; "
        'or give its memory, as in "cuda:24GiB".'
    )


def cublas_workspace_bytes(capability: tuple[int, int], environment: Mapping[str, str] = os.environ) -> int:
    """Return the workspace that torch allocates for each pair of a cuBLAS handle and a stream, at the first product.

    Forward and backward run in threads with a handle each, so a training step on one stream has two. Read in
    aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize): 8,519,680 bytes (":4096:2:16:8"), 32 MiB on
    Hopper, and on Blackwell (10.x, 12.x) since github.com/pytorch/pytorch/pull/175344 of February 2026.
    CUBLAS_WORKSPACE_CONFIG replaces them: pairs ":KiB:count".
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) * _KIB
    major = capability[0]
    return 32 * 2**20 if major in (9, 10, 12) else (4096 * 2 + 16 * 8) * _KIB


def _key(name: str) -> str:
    """Return the part of a name that tells GPUs apart: "NVIDIA A100-SXM4-80GB" gives "a10080"."""
    bare = re.sub(r"nvidia|geforce|tesla|pcie|sxm\d?|hbm\d?e?|(?<=\d)\s*gb\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", bare)
