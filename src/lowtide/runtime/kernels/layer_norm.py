"""Layer norm from its saved statistics: one pass over the input. Imports Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from torch import Tensor

MOST_AT_ONCE = 4096
"""Largest number of elements of a row that one program holds in registers."""


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _rows(  # type: ignore[no-untyped-def]  # Triton reads the annotations of a kernel, and knows none but its own
    input, mean, rstd, weight, bias, out, width, has_weight: tl.constexpr, has_bias: tl.constexpr, block: tl.constexpr
):
    """Write one row: `weight * (rstd * (input - mean)) + bias`, in single precision, converted once at the end.

    torch's kernel multiplies by the weight and adds the bias in one rounding; `fma` does the same with any compiler.
    """
    row = tl.program_id(0).to(tl.int64)
    center, scale = tl.load(mean + row), tl.load(rstd + row)
    for start in range(0, width, block):
        column = start + tl.arange(0, block)
        inside = column < width
        result = scale * (tl.load(input + row * width + column, mask=inside, other=0.0).to(tl.float32) - center)
        if has_weight:
            factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            if has_bias:
                shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
                result = tl.fma(factor, result, shift)
            else:
                result = factor * result
        tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


def layer_norm_from_statistics(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, width: int
) -> Tensor:
    """Compute a layer norm's output from its saved statistics. Raises RuntimeError for unsupported tensors."""
    if mean.dtype is not torch.float32 or (weight is None and bias is not None):
        raise RuntimeError("no statistics in single precision, or a bias alone")
    input, mean, rstd = input.contiguous(), mean.contiguous(), rstd.contiguous()
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    out = torch.empty_like(input)
    block = min(MOST_AT_ONCE, triton.next_power_of_2(width))
    parts = (input, mean, rstd, input if weight is None else weight, input if bias is None else bias, out, width)
    with torch.cuda.device(input.device):
        _rows[mean.numel(),](*parts, has_weight=weight is not None, has_bias=bias is not None, block=block)
    return out
