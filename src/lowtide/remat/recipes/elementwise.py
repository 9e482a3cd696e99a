"""Arithmetic on each element. A factor that needs no gradient makes the other one unsaved: it is found on the edge."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import recipe


@recipe("MulBackward0", edges={"self": 0, "other": 1})
def mul(self: Tensor, other: Tensor) -> Tensor:
    """Also dropout on a CPU: the product with its saved mask."""
    return self * other


@recipe("AddBackward0", edges={"x": 0, "y": 1})
def add(x: Tensor, y: Tensor, *, alpha: float) -> Tensor:
    """Of two tensors. A scalar that was added is not recorded and has no edge: such a result is kept."""
    return torch.add(x, y, alpha=alpha)


@recipe("SubBackward0", edges={"x": 0, "y": 1})
def sub(x: Tensor, y: Tensor, *, alpha: float) -> Tensor:
    return torch.sub(x, y, alpha=alpha)


@recipe("DivBackward0", edges={"self": 0, "other": 1})
def div(self: Tensor, other: Tensor) -> Tensor:
    return self / other


@recipe("PowBackward0", edges={"self": 0})
def pow(self: Tensor, *, exponent: float) -> Tensor:
    return torch.pow(self, exponent)


@recipe("NegBackward0", edges={"x": 0})
def neg(x: Tensor) -> Tensor:
    return -x


@recipe("RsqrtBackward0", edges={"x": 0})
def rsqrt(x: Tensor) -> Tensor:
    return torch.rsqrt(x)


@recipe("NativeDropoutBackward0", edges={"x": 0})
def native_dropout(x: Tensor, result1: Tensor, *, p: float) -> Tensor:
    """CUDA's fused dropout, from the mask that it saved."""
    return x * result1 * (1.0 / (1.0 - p))


@recipe("ToCopyBackward0", edges={"x": 0})
def to_copy(x: Tensor, *, out_dtype: torch.dtype, out_device: torch.device) -> Tensor:
    """A cast: autocast's copies of activations and of weights."""
    return x.to(device=out_device, dtype=out_dtype, copy=True)
