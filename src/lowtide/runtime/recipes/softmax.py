"""Softmax and log-softmax, which save their own result: it is recomputed from the scores on the input edge."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide._torch.fake_modes import is_fake
from lowtide.runtime.recipes.registry import aten, recipe


@recipe("SoftmaxBackward0", edges={"self": 0})
def softmax(self: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    return aten._softmax(self, dim, self.dtype != out_dtype)


@recipe("LogSoftmaxBackward0", edges={"self": 0})
def log_softmax(self: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    return aten._log_softmax(self, dim, self.dtype != out_dtype)


@recipe("SafeSoftmaxBackward0", edges={"self": 0})
def safe_softmax(self: Tensor, *, dim: int, out_dtype: torch.dtype) -> Tensor:
    """Recompute attention's softmax, in which fully masked rows become 0. Such rows are found by their maximum, without
    an elementwise mask.
    """
    made = torch.softmax(self, dim, dtype=out_dtype)
    if made.numel() and may_be_masked_out(made, dim):
        made.masked_fill_(self.amax(dim, keepdim=True) == -torch.inf, 0.0)
    return made


def may_be_masked_out(made: Tensor, dim: int) -> bool:
    """Return True if a row of the softmax result `made` may be fully masked; all elements of such a row are NaN.

    Returns True on a GPU, where a check would synchronize, and False for a fake tensor, because the memory of the
    recompute hardly depends on masked rows.
    """
    if is_fake(made):
        return False
    return made.device.type != "cpu" or bool(made.select(dim, 0).isnan().any())
