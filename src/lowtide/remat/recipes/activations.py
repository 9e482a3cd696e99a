"""Activation functions."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import recipe

aten = torch.ops.aten


@recipe("GeluBackward0", edges={"self": 0})
def gelu(self: Tensor, *, approximate: str) -> Tensor:
    return aten.gelu(self, approximate=approximate)


@recipe("SiluBackward0", edges={"self": 0})
def silu(self: Tensor) -> Tensor:
    return aten.silu(self)


# These save their own result: what makes it again is upstream, on the edge.


@recipe("ReluBackward0", edges={"x": 0})
def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


@recipe("TanhBackward0", edges={"x": 0})
def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x)


@recipe("SigmoidBackward0", edges={"x": 0})
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)
