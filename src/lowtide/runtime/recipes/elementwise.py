"""Arithmetic on each element.

Operands of additions and subtractions are not recorded, and only those that need a gradient have an edge; others are
captured when the operator is called (`runtime/operand_capture.py`). If one factor of a product needs no gradient, the
other one is not saved, but found on its edge.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import Function, recipe

UNARY: dict[str, Callable[..., Tensor]] = {
    "AbsBackward0": torch.abs,
    "AcosBackward0": torch.acos,
    "AsinBackward0": torch.asin,
    "AtanBackward0": torch.atan,
    "CeilBackward0": torch.ceil,
    "CosBackward0": torch.cos,
    "CoshBackward0": torch.cosh,
    "ErfBackward0": torch.erf,
    "ErfcBackward0": torch.erfc,
    "Exp2Backward0": torch.exp2,
    "ExpBackward0": torch.exp,
    "Expm1Backward0": torch.expm1,
    "FloorBackward0": torch.floor,
    "FracBackward0": torch.frac,
    "Log10Backward0": torch.log10,
    "Log1PBackward0": torch.log1p,
    "Log2Backward0": torch.log2,
    "LogBackward0": torch.log,
    "NegBackward0": torch.neg,
    "ReciprocalBackward0": torch.reciprocal,
    "RoundBackward0": torch.round,
    "RsqrtBackward0": torch.rsqrt,
    "SigmoidBackward0": torch.sigmoid,
    "SignBackward0": torch.sign,
    "SinBackward0": torch.sin,
    "SincBackward0": torch.sinc,
    "SinhBackward0": torch.sinh,
    "SqrtBackward0": torch.sqrt,
    "TanBackward0": torch.tan,
    "TanhBackward0": torch.tanh,
    "TruncBackward0": torch.trunc,
}
"""Operators of a single tensor and no constants. Some save that tensor, others their own result."""


def unary(op: Callable[..., Tensor]) -> Function:
    def function(self: Tensor, *, out: Tensor | None = None) -> Tensor:
        return op(self, out=out)

    function.__name__ = op.__name__
    return function


for node, op in UNARY.items():
    recipe(node, edges={"self": 0})(unary(op))


@recipe("AddBackward0", edges={"self": 0, "other": 1})
def add(self: Tensor, other: Tensor, *, alpha: float, out: Tensor | None = None) -> Tensor:
    """Recompute a sum of tensors, or of a tensor and a number."""
    return torch.add(self, other, alpha=alpha, out=out)


@recipe("SubBackward0", edges={"self": 0, "other": 1})
def sub(self: Tensor, other: Tensor, *, alpha: float, out: Tensor | None = None) -> Tensor:
    """Recompute a difference of tensors, or of a tensor and a number in either order."""
    return torch.sub(self, other, alpha=alpha, out=out)


@recipe("RsubBackward0", edges={"self": 0, "other": 1})
def rsub(self: Tensor, other: Tensor, *, alpha: float) -> Tensor:
    """Recompute the difference of two tensors that need gradients."""
    return torch.rsub(self, other, alpha=alpha)


@recipe("RsubBackward1", edges={"self": 0})
def rsub_scalar(self: Tensor, other: Tensor, *, alpha: float) -> Tensor:
    """Recompute a number minus a tensor."""
    return torch.rsub(self, other, alpha=alpha)


@recipe("MulBackward0", edges={"self": 0, "other": 1})
def mul(self: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Recompute a product, also with a Python number; and dropout on a CPU, which is a product with its saved mask."""
    return torch.mul(self, other, out=out)


@recipe("MulBackward1", edges={"self": 0})
def mul_scalar(self: Tensor, *, other: float, out: Tensor | None = None) -> Tensor:
    """Recompute a product with a number. User code can't make this node: it is made only by operators inside torch."""
    return torch.mul(self, other, out=out)


@recipe("DivBackward0", edges={"self": 0, "other": 1})
def div(self: Tensor, other: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Recompute a quotient, also by a Python number."""
    return torch.div(self, other, out=out)


@recipe("DivBackward1", edges={"self": 0})
def div_scalar(self: Tensor, *, other: float, out: Tensor | None = None) -> Tensor:
    """Recompute a quotient by a number. Only torch's own code makes this node."""
    return torch.div(self, other, out=out)


@recipe("DivBackward2", edges={"self": 0, "other": 1})
def div_mode(self: Tensor, other: Tensor, *, rounding_mode: str | None) -> Tensor:
    return torch.div(self, other, rounding_mode=rounding_mode)


@recipe("PowBackward0", edges={"self": 0})
def pow_scalar(self: Tensor, *, exponent: float, out: Tensor | None = None) -> Tensor:
    return torch.pow(self, exponent, out=out)


@recipe("PowBackward1", edges={"self": 0, "exponent": 1})
def pow_tensor(self: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(self, exponent)


@recipe("PowBackward2", edges={"exponent": 0})
def pow_of_scalar(exponent: Tensor, *, self: float) -> Tensor:
    return torch.pow(self, exponent)


@recipe("AddcmulBackward0", edges={"self": 0, "tensor1": 1, "tensor2": 2})
def addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float) -> Tensor:
    return torch.addcmul(self, tensor1, tensor2, value=value)


@recipe("AddcdivBackward0", edges={"self": 0, "tensor1": 1, "tensor2": 2})
def addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float) -> Tensor:
    return torch.addcdiv(self, tensor1, tensor2, value=value)


@recipe("LerpBackward0", edges={"self": 0, "end": 1})
def lerp_scalar(self: Tensor, end: Tensor, *, weight: float) -> Tensor:
    return torch.lerp(self, end, weight)


@recipe("LerpBackward1", edges={"self": 0, "end": 1, "weight": 2})
def lerp_tensor(self: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(self, end, weight)


@recipe("Atan2Backward0", edges={"self": 0, "other": 1})
def atan2(self: Tensor, other: Tensor) -> Tensor:
    return torch.atan2(self, other)


@recipe("MaximumBackward0", edges={"self": 0, "other": 1})
def maximum(self: Tensor, other: Tensor) -> Tensor:
    return torch.maximum(self, other)


@recipe("MinimumBackward0", edges={"self": 0, "other": 1})
def minimum(self: Tensor, other: Tensor) -> Tensor:
    return torch.minimum(self, other)


@recipe("ClampBackward1", edges={"self": 0})
def clamp(self: Tensor, *, min: float | None, max: float | None) -> Tensor:
    return torch.clamp(self, min, max)


@recipe("ClampMinBackward0", edges={"self": 0})
def clamp_min(self: Tensor, *, min: float) -> Tensor:
    return torch.clamp_min(self, min)


@recipe("ClampMaxBackward0", edges={"self": 0})
def clamp_max(self: Tensor, *, max: float) -> Tensor:
    return torch.clamp_max(self, max)


@recipe("ClampMinBackward1", edges={"self": 0, "min": 1})
def clamp_min_tensor(self: Tensor, min: Tensor) -> Tensor:
    return torch.clamp_min(self, min)


@recipe("ClampMaxBackward1", edges={"self": 0, "max": 1})
def clamp_max_tensor(self: Tensor, max: Tensor) -> Tensor:
    return torch.clamp_max(self, max)
