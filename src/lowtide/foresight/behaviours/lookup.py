"""Backward of embeddings and of indexing: indices are sorted, so that each row is written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.foresight.behaviours.behaviour import Behaviour, Inside

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

ROWS = (
    Behaviour(
        name="embedding, backward",
        does="beyond 3072 indices: indices, sorted, with their origins; a row in single precision for each tenth",
        source="aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu, torch 2.13",
        exact=False,
    ),
    Behaviour(
        name="indexing, backward",
        does="linear, sorted and original indices",
        source="aten/src/ATen/native/cuda/Indexing.cu: index_put_with_sort_kernel, torch 2.13",
        exact=False,
    ),
)

_UNSORTED = 3072
"""Indices up to which the kernel does without sorting, where none is padding."""

_ROWS_EACH = 10
"""NROWS_PER_THREAD"""


def _embedding(args: Any, kwargs: Any, made: list[Tensor]) -> list[Inside]:
    gradient, indices, _, padding = args[:4]
    n, width = indices.numel(), gradient.shape[-1]
    if n <= _UNSORTED and padding < 0:
        return []
    sorting = n * indices.element_size()
    segments = -(-n // _ROWS_EACH)
    return [
        *[Inside.exactly(sorting)] * 2,
        Inside(2 * sorting, sorting, 4 * sorting),
        Inside(segments * width * 4, segments * width * 4, (segments + min(n, made[0].shape[0])) * width * 4),
    ]


def _index_put(args: Any, kwargs: Any, made: list[Tensor]) -> list[Inside]:
    if len(args) < 4 or not args[3]:  # not accumulated: written as it comes
        return []
    n = max((index.numel() for index in args[1] if index is not None), default=0)
    return [*[Inside.exactly(n * 8)] * 3, Inside(n * 16, 0, n * 32)]


INSIDE = {
    aten.embedding_dense_backward.default: _embedding,
    **dict.fromkeys((aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default), _index_put),
}
