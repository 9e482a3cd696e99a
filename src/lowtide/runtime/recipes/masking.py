"""Operators with masks: `where`, `masked_fill` and dropout. Random masks are not drawn again: the node has saved them.

A mask itself, which no node made, is kept whole or as one bit per element (`runtime/bitmask.py`).
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe("WhereBackward0", edges={"self": 0, "other": 1})
def where(condition: Tensor, self: Tensor, other: Tensor) -> Tensor:
    """Recompute `where` of two tensors that need gradients, or of one tensor and a number."""
    return torch.where(condition, self, other)


@recipe("TrilBackward0", edges={"self": 0})
def tril(self: Tensor, *, diagonal: int) -> Tensor:
    return self.tril(diagonal)


@recipe("TriuBackward0", edges={"self": 0})
def triu(self: Tensor, *, diagonal: int) -> Tensor:
    return self.triu(diagonal)


def filled(self: Tensor, mask: Tensor, value: Tensor | float) -> Tensor:
    """Return the result of `masked_fill`, without the host sync that reading a fill value on a GPU would cause."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return torch.where(mask, value.to(self), self)
    return self.masked_fill(mask, value)


@recipe("MaskedFillBackward0", edges={"self": 0})
def masked_fill(self: Tensor, mask: Tensor, value: Tensor | float) -> Tensor:
    """Recompute `masked_fill` with a number, which is captured when the operator is called."""
    return filled(self, mask, value)


@recipe("MaskedFillBackward1", edges={"self": 0, "value": 1})
def masked_fill_tensor(self: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return filled(self, mask, value)


@recipe("MaskedScatterBackward0", edges={"self": 0, "source": 1})
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return self.masked_scatter(mask, source)


@recipe("NativeDropoutBackward0", edges={"input": 0})
def native_dropout(input: Tensor, result1: Tensor, *, p: float, out_device: torch.device) -> Tensor:
    """Recompute fused dropout from its saved mask.

    On a CPU the scale is rounded to the input's dtype. On a GPU it is rounded to float32, and the kernel of backward
    computes the same product as that of forward.
    """
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    if out_device.type == "cpu":
        return input * (result1.to(input.dtype) * scale)
    if p != 1 and input.dtype != torch.float64:
        scale = single(1.0 / single(1.0 - p))
    return aten.native_dropout_backward(input, result1, scale)


def single(number: float) -> float:
    """Round a number to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
