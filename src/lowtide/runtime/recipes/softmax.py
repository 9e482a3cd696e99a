"""Softmax and log-softmax save their own result; it is made again from the scores on the edge."""

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
    """Attention's own: zero where a row is masked out altogether, found without a mask of every number."""
    made = torch.softmax(self, dim, dtype=out_dtype)
    if made.numel() and may_be_masked_out(made, dim):
        made.masked_fill_(self.amax(dim, keepdim=True) == -torch.inf, 0.0)
    return made


def may_be_masked_out(made: Tensor, dim: int) -> bool:
    """Whether a row of a softmax may be. Such a row is not a number throughout, so one of each is looked at.

    Not on a device, which would have to be waited for, nor where there is nothing to look at: then it makes no
    difference to memory worth the name.
    """
    if is_fake(made):
        return False
    return made.device.type != "cpu" or bool(made.select(dim, 0).isnan().any())
