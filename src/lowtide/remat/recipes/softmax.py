"""Softmax and log-softmax save their own result; it is made again from the scores on the edge."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import aten, recipe


@recipe("SoftmaxBackward0", edges={"self": 0})
def softmax(self: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    return aten._softmax(self, dim, self.dtype != out_dtype)


@recipe("LogSoftmaxBackward0", edges={"self": 0})
def log_softmax(self: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    return aten._log_softmax(self, dim, self.dtype != out_dtype)


@recipe("SafeSoftmaxBackward0", edges={"self": 0})
def safe_softmax(self: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    """Attention's own: zero where a row is masked out altogether."""
    return aten._safe_softmax(self, dim, out_dtype)
