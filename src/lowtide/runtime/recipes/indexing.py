"""Elements taken from a tensor by index: embeddings, gathers, and operators that save the indices of their results."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe("EmbeddingBackward0", edges={"weight": 0})
def embedding(weight: Tensor, indices: Tensor) -> Tensor:
    return torch.embedding(weight, indices)


@recipe("EmbeddingBagBackward0", edges={"weight": 0, "per_sample_weights": 1})
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    *,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    padding_idx: int,
    out_shape: torch.Size,
) -> Tensor:
    """Recompute an embedding bag. `include_last_offset` is not recorded, but follows from the number of bags."""
    last = offsets.numel() > out_shape[0]
    settings = (scale_grad_by_freq, mode, sparse, per_sample_weights, last, padding_idx)
    bags: Tensor = aten._embedding_bag(weight, indices, offsets, *settings)[0]
    return bags


@recipe("GatherBackward0", edges={"self": 0})
def gather(self: Tensor, index: Tensor, *, dim: int) -> Tensor:
    return self.gather(dim, index)


@recipe("IndexSelectBackward0", edges={"self": 0})
def index_select(self: Tensor, index: Tensor, *, dim: int) -> Tensor:
    return self.index_select(dim, index)


@recipe("IndexBackward0", edges={"self": 0})
def index(self: Tensor, indices: list[Tensor | None]) -> Tensor:
    return aten.index(self, indices)


@recipe("TakeBackward0", edges={"self": 0})
def take(self: Tensor, index: Tensor) -> Tensor:
    return self.take(index)


@recipe("MaskedSelectBackward0", edges={"self": 0})
def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    return self.masked_select(mask)


@recipe("TopkBackward0", "SortBackward0", "SortBackward1", edges={"self": 0})
def sorted(self: Tensor, indices: Tensor, *, dim: int) -> Tensor:
    return self.gather(dim, indices)


@recipe(
    "KthvalueBackward0",
    "MaxBackward0",
    "MedianBackward1",
    "MinBackward0",
    "ModeBackward0",
    "NanmedianBackward1",
    edges={"self": 0},
)
def chosen(self: Tensor, indices: Tensor, *, dim: int, keepdim: bool) -> Tensor:
    """Recompute max, min, median and similar operators along a dimension, by the saved index of their result."""
    return self.gather(dim, indices) if keepdim else self.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
