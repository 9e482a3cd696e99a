"""CPU scratch memory of embedding bags: the forward sums over table rows, and the gradient of the table.

Read in aten/src/ATen/native/EmbeddingBag.cpp, measured with torch 2.13. Bags that are empty or all padding, which torch
skips, are counted, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

BACKWARD = aten._embedding_bag_backward.default

_SUM, _MEAN, _MAX = range(3)


def forward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes at the peak of an embedding bag's forward.

    The kernel frees a temporary as large as `results[1]` (the bag of each index) before it allocates `results[2:]`, so
    only the excess counts. With `mode="mean"`, the row counts of the bags count instead if they are larger.
    """
    if len(results) < 4 or not results[1].numel():  # plain sums need no counts
        return []
    mode = args[4] if len(args) > 4 else kwargs.get("mode", _SUM)
    later = sum(tensor.nbytes for tensor in results[2:])
    means = 2 * results[2].nbytes + results[0].shape[0] * results[0].element_size() if mode == _MEAN else 0
    return [max(0, results[1].nbytes - later, means)]


def backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of an embedding bag's backward.

    They consist of the bag of each index, unless forward saved it, and of scratch memory for the table's gradient. For
    a dense gradient, these are sorted indices, and a copy of the incoming gradient if it is not contiguous.
    """
    grad, indices, offsets, bag_of, bag_size = args[:5]
    mode, is_sparse, weights = args[8:11]
    n_bytes = torch.promote_types(indices.dtype, offsets.dtype).itemsize
    counted = 0 if bag_of.numel() else (indices.numel() + 1) * n_bytes
    if is_sparse:
        return [counted, *_sparse(grad, indices, bag_size, mode, has_padding(args))]
    copied = 0 if grad.is_contiguous() else grad.nbytes
    if mode == _MAX:
        return [copied, grad.nbytes, args[5].numel() * n_bytes, bag_size.numel() * _INDEX]
    weighed = 0 if weights is None else weights.nbytes
    unsorted = max(indices.numel() * _INDEX, indices.numel() * n_bytes + weighed)
    return [counted, copied, indices.numel() * n_bytes, indices.numel() * _INDEX, unsorted]


def has_padding(args: Any) -> bool:
    """Return True if the backward operator with these arguments skips a padding index."""
    return len(args) > 11 and args[11] >= 0


def _sparse(grad: Tensor, indices: Tensor, bag_size: Tensor, mode: int, padded: bool) -> list[int]:
    """Return the scratch bytes of a table's sparse gradient.

    Without padding, the values are the gradients of the indices themselves, and only a mean needs scratch memory.
    """
    column_bytes = indices.numel() * grad.element_size()
    if padded:
        return [column_bytes * grad.shape[1], indices.numel(), indices.nbytes]
    if mode != _MEAN:
        return []
    widened = 0 if indices.dtype == torch.long else indices.numel() * _INDEX  # allocated later
    return [max(0, 2 * bag_size.numel() * grad.element_size() + column_bytes - widened)]


def weights_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of the per-sample weights' gradient.

    They are two arrays with the bag of each index, or none if forward has saved such an array.
    """
    indices, bag_of = args[2], args[4]
    return [] if bag_of.numel() else [2 * (indices.numel() + 1) * bag_of.element_size()]


_INDEX = torch.long.itemsize
