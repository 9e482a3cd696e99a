"""Rows taken from a table."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.remat.recipes.registry import recipe


@recipe("EmbeddingBackward0", edges={"weight": 0})
def embedding(weight: Tensor, indices: Tensor) -> Tensor:
    return torch.embedding(weight, indices)
