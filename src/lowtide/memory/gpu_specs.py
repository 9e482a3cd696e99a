"""A table of GPUs, to plan for them on a machine that has none. The numbers and their sources are in `gpus.toml`.

The CUDA context of each process is taken from a GPU's memory too: see `CONTEXT_BYTES`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import BudgetError, LowtideError
from lowtide.utils.amounts import parse_bytes

_KIB = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Name, memory and compute capability of one kind of GPU."""

    name: str
    total_bytes: int
    """torch's `total_memory`: the part of the nominal size that the driver leaves."""
    capability: tuple[int, int] | None
    """Compute capability; None for a GPU whose memory size alone is known."""
    source: str
    """Address of the report that states the size."""
    shared: bool = False
    """True if the GPU shares the host's memory, of which the system and the process take a part."""

    def compute_cublas_workspace(self, environment: Mapping[str, str] = os.environ) -> int | None:
        """Return the bytes of each cuBLAS handle's workspace; None if the capability is unknown."""
        return None if self.capability is None else compute_cublas_workspace(self.capability, environment)


def _read_table() -> tuple[GpuSpec, ...]:
    rows = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))["gpu"]
    return tuple(GpuSpec(**{**row, "capability": tuple(row["capability"])}) for row in rows)


GPUS = _read_table()
"""Known GPUs, the smallest first."""

CONTEXT_BYTES = 250 * 2**20, 700 * 2**20
"""Least and most bytes that a CUDA context, library handles and loaded kernels take of a GPU. They are not the
allocator's.

Reported are 287 MB if kernels are loaded lazily and 667 MB if not (github.com/pytorch/pytorch/issues/86509), about 300
MB (107667) and 400 MB (109888), and 426 MiB on an RTX 6000 Ada (github.com/unslothai/unsloth-zoo/issues/1053); it grows
with the GPU's multiprocessors and differs by driver.
"""

_SHORTEST = 3
"""Smallest number of letters and digits of an abbreviated name: "cuda:5" is not taken for an RTX 5090."""


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


def parse_gpus(text: str | GpuSpec) -> tuple[GpuSpec, int | None]:
    """Return the GPU that a text names, and the number of GPUs if it has one, as in "8 x H100-80"; else None."""
    several = re.fullmatch(r"\s*([0-9]+)\s*[x*]\s*(.+)", text, re.IGNORECASE) if isinstance(text, str) else None
    if several is None:
        return parse_gpu(text), None
    n = int(several[1])
    if not n:
        raise LowtideError(f'{text!r} is less than one GPU. Give a number of them from 1 on, as in "8 x H100-80".')
    return parse_gpu(several[2]), n


def compute_cublas_workspace(capability: tuple[int, int], environment: Mapping[str, str] = os.environ) -> int:
    """Return the workspace bytes that torch allocates for each pair of a cuBLAS handle and a stream.

    Torch allocates them at the first matrix product. Forward and backward run in threads with a handle each, so a
    training step on one stream has two. The sizes were read in aten/src/ATen/cuda/CublasHandlePool.cpp
    (parseChosenWorkspaceSize): 8,519,680 bytes (":4096:2:16:8"), 32 MiB on Hopper, and on Blackwell (10.x, 12.x) since
    github.com/pytorch/pytorch/pull/175344 of February 2026.
    CUBLAS_WORKSPACE_CONFIG replaces them: pairs ":KiB:count".
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * int(count) for kib, count in pairs) * _KIB
    major = capability[0]
    return 32 * 2**20 if major in (9, 10, 12) else (4096 * 2 + 16 * 8) * _KIB


def _key(name: str) -> str:
    """Return the part of a name that tells GPUs apart: "NVIDIA A100-SXM4-80GB" gives "a10080"."""
    bare = re.sub(r"nvidia|geforce|tesla|generation|pcie|sxm\d?|hbm\d?e?|(?<=\d)\s*gb\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", bare)
