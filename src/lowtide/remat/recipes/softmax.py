"""Softmax and log-softmax save their own result; it is made again from the scores on the edge."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import recipe

aten = torch.ops.aten


@recipe("SoftmaxBackward0", edges={"x": 0})
def softmax(x: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    return torch.softmax(x, dim, dtype=out_dtype)


@recipe("LogSoftmaxBackward0", edges={"x": 0})
def log_softmax(x: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    return torch.log_softmax(x, dim, dtype=out_dtype)
