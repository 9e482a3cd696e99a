"""Backward of embeddings and of indexing: indices are sorted, so that each row is written once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, cuda_op

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_EMBEDDING = Behaviour(
    name="embedding, backward",
    does="beyond 3072 indices: the sorted indices, their origins, the start of each row, and sums of up to ten "
    "gradients of a row; for tables of few rows in half precision, one more table instead",
    source="aten/src/ATen/native/cuda/Embedding.cu: embedding_dense_backward_cuda, EmbeddingBackwardKernel.cu: "
    "embedding_backward_cuda_kernel, torch with pull request 172454 of January 2026",
    exact=False,
)
Behaviour(
    name="sorting",
    does="sorts pairs of keys and values into a second pair of arrays, unless they are few",
    source="torch/include/ATen/cuda/cub-RadixSortPairs.cuh: radix_sort_pairs_impl, torch 2.13",
    exact=False,
)
_INDEXING = Behaviour(
    name="indexing, backward",
    does="linear, sorted and original indices; and the values, if they are broadcast",
    source="aten/src/ATen/native/cuda/Indexing.cu: index_put_with_sort_kernel, torch with BComplex32, of 2026",
    exact=False,
)

_UNSORTED = 3072
"""Largest number of indices for which the kernel does not sort."""

_ROWS_EACH = 10
"""Rows that each thread adds up (NROWS_PER_THREAD)."""

_WARP, _THREADS = 32, 1024
"""Threads of a warp, and of a block at most (MAX_BLOCK_SIZE)."""

_BLOCKS_EACH = 4
"""Thread blocks per multiprocessor below which all rows are added up in one pass (MAX_ATOMIC_ACCUM_BLOCKS_PER_SM)."""

_MULTIPROCESSORS = (4, 192)
"""Multiprocessors of a GPU, at least and at most."""

_COUNT = 8
"""Bytes of the count of segments, which the kernels leave on the GPU."""

_HISTOGRAMS = 64 * 2**10


@cuda_op(aten.embedding_dense_backward.default, of=_EMBEDDING)
def _embedding(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    gradient, indices, n_rows, _, by_frequency = args[:5]
    n, width, itemsize = indices.numel(), gradient.shape[-1], indices.element_size()
    inside = [ScratchBlock.exactly(t.numel() * t.element_size()) for t in (indices, gradient) if not t.is_contiguous()]
    if n <= _UNSORTED and not by_frequency:
        return inside
    listed, segments = ScratchBlock.exactly(n * itemsize), min(n, n_rows)
    partial = n // _ROWS_EACH + segments  # sums of up to ten gradients
    inside += [listed, listed, ScratchBlock.exactly(n * itemsize, through=1), _make_sort_block(n, 2 * itemsize)]
    inside += [listed] * bool(by_frequency)
    inside += [listed, ScratchBlock.exactly(_COUNT), ScratchBlock.exactly(n * itemsize, through=0)]
    inside += [ScratchBlock.exactly(segments * itemsize)] * 2
    inside += [ScratchBlock.exactly(_COUNT), ScratchBlock.exactly(partial * itemsize)]
    return [*inside, _make_sum_block(gradient, partial, segments, n_rows * width, itemsize)]


def _make_sum_block(gradient: Tensor, partial: int, segments: int, table: int, itemsize: int) -> ScratchBlock:
    """Return the scratch block in which the kernel sums the gradients of each row of the embedding table.

    The kernel runs in one pass if there are few thread blocks for each multiprocessor, else in two. The number of
    multiprocessors is not known, so the block may be known only within the bounds of both. `partial` and `segments` are
    the largest numbers of partial sums and of different indices, `table` is the table's number of elements, and
    `itemsize` an index's bytes.
    """
    width = gradient.shape[-1]
    accumulated = 8 if gradient.dtype is torch.float64 else 4
    two_passes = partial * width * accumulated
    one_pass = partial * itemsize + (table * 4 if gradient.element_size() < 4 else 0)
    warped = -(-width // _WARP) * _WARP
    grid = -(-segments * warped // min(warped, _THREADS))
    few = partial > 4 * grid and not torch.are_deterministic_algorithms_enabled()
    fewest, most = (processors * _BLOCKS_EACH for processors in _MULTIPROCESSORS)
    if not few or grid >= most:
        return ScratchBlock.exactly(two_passes)
    if grid < fewest:
        return ScratchBlock.exactly(one_pass)
    return ScratchBlock(max(one_pass, two_passes), min(one_pass, two_passes), max(one_pass, two_passes))


def _make_sort_block(n: int, itemsize: int) -> ScratchBlock:
    """Return the block for sorting `n` (key, index) pairs: second arrays of keys and indices, and histograms."""
    return ScratchBlock(n * itemsize, 0, n * (itemsize + 1) + _HISTOGRAMS, through=0)


@cuda_op(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default, of=_INDEXING)
def _index_put(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of `index_put(into, indices, values, accumulate)`: sorted indices and copied values.

    Without accumulation there are no blocks.
    """
    if len(args) < 4 or not args[3]:  # without accumulation rows are written unsorted
        return []
    into, indices, values = args[:3]
    shapes = [index.shape for index in indices if index is not None]
    n = torch.broadcast_shapes(*shapes).numel()  # type: ignore[no-untyped-call]
    n_rows = 1
    for dim, index in enumerate(indices):
        if index is not None and dim < into.dim():
            n_rows *= into.shape[dim]
    n_written = n * into.numel() // max(n_rows, 1)
    inside = [ScratchBlock.exactly(n * 8)]
    if values.numel() != n_written or not values.is_contiguous():
        inside.append(ScratchBlock.exactly(n_written * values.element_size()))
    return [
        *inside,
        *[ScratchBlock.exactly(n * 8)] * 2,
        ScratchBlock.exactly(n * 8, through=1),
        _make_sort_block(n, 16),
    ]
