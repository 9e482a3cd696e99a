"""Norms. What their nodes do not record is asked of the module that owns the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import recipe

aten = torch.ops.aten


@recipe("NativeLayerNormBackward0", edges={"input": 0, "weight": 1, "bias": 2}, owner="weight")
def layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *, normalized_shape: tuple[int, ...], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return aten.native_layer_norm(input, normalized_shape, weight, bias, eps)


@recipe("NativeBatchNormBackward0", edges={"input": 0, "weight": 1, "bias": 2}, owner="weight")
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """In training the batch's own statistics count: the running ones are not passed, so they are not updated twice."""
    if training:
        running_mean = running_var = None
    return aten.native_batch_norm(input, weight, bias, running_mean, running_var, training, 0.0, eps)
