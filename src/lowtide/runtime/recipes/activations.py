"""Activation functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.runtime.recipes.registry import aten, recipe

_relu_ = torch.relu_
"""torch's own function, which reports no writes while a plan is in force."""

# Functions that save their own result: the operand from which the result is recomputed is on the input edge.


@recipe("ReluBackward0", edges={"self": 0})
def relu(self: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Recompute ReLU. The in-place form has overwritten its input, such as a batch norm's output, so the input is
    recomputed first.
    """
    return torch.relu(self) if out is None else _relu_(out)


@recipe("EluBackward0", "EluBackward1", edges={"self": 0})
def elu(self: Tensor, *, alpha: float, scale: float, input_scale: float) -> Tensor:
    """Recompute ELU and SELU; `EluBackward1` is the in-place form."""
    return aten.elu(self, alpha, scale, input_scale)


@recipe("CeluBackward0", "CeluBackward1", edges={"self": 0})
def celu(self: Tensor, *, alpha: float) -> Tensor:
    return torch.celu(self, alpha)


@recipe("LeakyReluBackward0", "LeakyReluBackward1", edges={"self": 0})
def leaky_relu(self: Tensor, *, negative_slope: float) -> Tensor:
    return F.leaky_relu(self, negative_slope)


# Functions that save their input; their in-place forms save a copy of the input.


@recipe("GeluBackward0", edges={"self": 0})
def gelu(self: Tensor, *, approximate: str) -> Tensor:
    return aten.gelu(self, approximate=approximate)


@recipe("SiluBackward0", edges={"self": 0})
def silu(self: Tensor) -> Tensor:
    return F.silu(self)


@recipe("MishBackward0", edges={"self": 0})
def mish(self: Tensor) -> Tensor:
    return F.mish(self)


@recipe("HardswishBackward0", edges={"self": 0})
def hardswish(self: Tensor) -> Tensor:
    return F.hardswish(self)


@recipe("HardsigmoidBackward0", edges={"self": 0})
def hardsigmoid(self: Tensor) -> Tensor:
    return F.hardsigmoid(self)


@recipe("HardtanhBackward0", edges={"self": 0})
def hardtanh(self: Tensor, *, min_val: float, max_val: float) -> Tensor:
    """Recompute hardtanh or ReLU6."""
    return F.hardtanh(self, min_val, max_val)


@recipe("SoftplusBackward0", edges={"self": 0})
def softplus(self: Tensor, *, beta: float, threshold: float) -> Tensor:
    return aten.softplus(self, beta, threshold)


@recipe("HardshrinkBackward0", edges={"self": 0})
def hardshrink(self: Tensor, *, lambd: float) -> Tensor:
    return F.hardshrink(self, lambd)


@recipe("SoftshrinkBackward0", edges={"self": 0})
def softshrink(self: Tensor, *, lambd: float) -> Tensor:
    return aten.softshrink(self, lambd)


@recipe("LogSigmoidBackward0", edges={"self": 0})
def logsigmoid(self: Tensor) -> Tensor:
    return F.logsigmoid(self)


@recipe("GluBackward0", edges={"self": 0})
def glu(self: Tensor, *, dim: int) -> Tensor:
    return F.glu(self, dim)


@recipe("PreluKernelBackward0", edges={"self": 0, "weight": 1})
def prelu(self: Tensor, weight: Tensor) -> Tensor:
    return aten._prelu_kernel(self, weight)
