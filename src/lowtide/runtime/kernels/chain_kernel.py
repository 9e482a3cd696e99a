"""Kernels for chains of elementwise operators, made from their source. Imports Triton."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor
from triton.language.extra import libdevice  # type: ignore[import-not-found,unused-ignore]

AT_ONCE = 1024
"""Number of elements of one program."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def round_to_bfloat16(x):  # type: ignore[no-untyped-def]  # Triton reads annotations of inner functions
    """Round to the nearest bfloat16, ties to even: in integers, so that no compiler can leave it out."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)


MATH = {"libdevice": libdevice}
"""Functions of a single number, which torch's kernels take from libdevice as well."""


@lru_cache(maxsize=256)
def compile_chain(source: str, index: str) -> Any:
    """Return the kernel of a source that `write_chain` wrote, with indices of the type `index`."""
    source = source.replace("INDEX", index)
    name = f"<lowtide chain {hash(source):x}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # where Triton reads it
    names: dict[str, Any] = {"tl": tl, "round_to_bfloat16": round_to_bfloat16, **MATH}
    exec(compile(source, name, "exec"), names)  # text of Lowtide's own expressions and numbers
    return triton.jit(names["chain"])


def run_chain(
    source: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], runs: Sequence[tuple[int, int]]
) -> None:
    """Fill `outputs` by the kernel of `source`. `runs` has the two numbers of each broadcast input."""
    n = outputs[0].numel()
    index = "tl.int32" if n < 2**31 - AT_ONCE else "tl.int64"
    kernel, numbers = compile_chain(source, index), [number for run in runs for number in run]
    with torch.cuda.device(outputs[0].device if outputs[0].is_cuda else -1):
        kernel[(triton.cdiv(n, AT_ONCE),)](*inputs, *outputs, n, *numbers, BLOCK=AT_ONCE, enable_fp_fusion=False)
