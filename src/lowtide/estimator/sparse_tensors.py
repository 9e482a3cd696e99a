"""Sparse results of operators on fake tensors, built with their indices and values.

torch's own fake kernels return sparse tensors without elements (torch 2.13). Duplicate indices are known if the indices
come from the batch. Otherwise all indices are assumed to differ and none to be padding, so a result has as many
elements as its sparse argument. Not yet: if a second backward pass adds to a sparse gradient in place, the gradient
keeps its size in the estimate, and a note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.fake_modes import on_real_tensors
from lowtide._torch.tensors import find_parts
from lowtide.estimator import embedding_bag as bags

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.values.value_oracle import ValueOracle

aten = torch.ops.aten


def parts(tensors: list[Tensor]) -> list[Tensor]:
    """Replace each sparse tensor in the list by its indices and values."""
    return [part for t in tensors for part in ((t,) if t.layout is torch.strided else find_parts(t))]


def is_sparse(arg: Any) -> bool:
    """Return True for a sparse tensor (COO)."""
    return isinstance(arg, torch.Tensor) and arg.layout is torch.sparse_coo


def is_compressed(tensor: Tensor) -> bool:
    """Return True for sparse layouts other than COO, such as CSR, whose fake tensors have no elements."""
    return tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def with_parts(sparse: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `sparse` with `change` applied to its indices and to its values."""
    indices, values = map(change, find_parts(sparse))
    return like(sparse, indices, values)


def kernel(
    func: Any, args: Any, answers: ValueOracle, *, by_autograd: Callable[[], bool]
) -> Callable[..., Tensor] | None:
    """Return the kernel for an operator on sparse tensors; None if no argument is sparse, so that torch's kernel works.

    `by_autograd` returns True if autograd calls the operator.
    """
    if func is bags.BACKWARD and args[9]:
        return _bag_backward
    if func not in KERNELS or not any(map(is_sparse, args[:2])):
        return None
    if func is aten.clone.default and all(part.is_contiguous() for part in find_parts(args[0])) and by_autograd():
        return _take_over
    return partial(KERNELS[func], answers)


def _take_over(sparse: Tensor, **options: Any) -> Tensor:
    """Return a tensor with the memory of `sparse`. Without a mode, autograd keeps such a gradient without a copy.

    torch/csrc/autograd/functions/accumulate_grad.h: AccumulateGrad::accumulateGrad, torch 2.13.
    """
    indices, values = find_parts(sparse)
    return like(sparse, indices, values)


def _clone(answers: ValueOracle, sparse: Tensor, **options: Any) -> Tensor:
    indices, values = find_parts(sparse)
    return like(sparse, _copy(answers, indices), values.clone())


def _coalesce(answers: ValueOracle, sparse: Tensor) -> Tensor:
    """Return a coalesced tensor. The CPU allocates room for all elements (_coalesce_sparse_cpu, torch 2.13)."""
    indices, values = find_parts(sparse)
    known = answers.value(indices)
    if known is None:
        return like(sparse, indices.clone(), torch.empty_like(values), coalesced=True)
    with on_real_tensors():
        different = torch.unique(known, dim=1)
    count = different.shape[1]
    has_room = sparse.device.type == "cpu"
    distinct = torch.empty_like(indices if has_room else indices[:, :count])[:, :count]
    answers.learn(distinct, different)
    inside = torch.empty_like(values if has_room else values[:count])[:count]
    return like(sparse, distinct, inside, coalesced=True)


def _mask(answers: ValueOracle, tensor: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Return the elements of a dense tensor at the indices of the sparse tensor `mask`."""
    indices, values = find_parts(mask)
    return like(mask, _copy(answers, indices), torch.empty_like(values, dtype=tensor.dtype))


def _transpose(answers: ValueOracle, sparse: Tensor, one: int = 0, other: int = 1) -> Tensor:
    """Return a copy with two dimensions exchanged (SparseTensor.cpp: transpose_sparse, on a clone; torch 2.13)."""
    indices, values = find_parts(sparse)
    one, other = one % sparse.dim(), other % sparse.dim()
    rows, shape = [*range(len(indices))], [*sparse.shape]
    for sizes in (rows, shape):  # torch accepts only sparse dimensions
        sizes[one], sizes[other] = sizes[other], sizes[one]
    copy = indices.clone()
    if (known := answers.value(indices)) is not None:
        with on_real_tensors():
            exchanged = known[rows]
        answers.learn(copy, exchanged)
    return torch.sparse_coo_tensor(copy, values.clone(), shape, is_coalesced=False, check_invariants=False)


def _add(answers: ValueOracle, sparse: Tensor, other: Tensor, **options: Any) -> Tensor:
    """Return the sum of two tensors: a dense tensor if one of them is dense, else the concatenated elements of both."""
    if sparse.layout is not other.layout:
        dense = other if sparse.layout is torch.sparse_coo else sparse
        return torch.empty_like(dense, dtype=torch.result_type(sparse, other))
    (indices, values), (more, added) = (tuple(find_parts(tensor)) for tensor in (sparse, other))
    both = torch.cat([indices, more], 1)
    known = answers.value(indices), answers.value(more)
    if known[0] is not None and known[1] is not None:
        with on_real_tensors():
            joined = torch.cat([known[0], known[1]], 1)
        answers.learn(both, joined)
    return like(sparse, both, torch.cat([values, added]), coalesced=False)


def _copy(answers: ValueOracle, indices: Tensor) -> Tensor:
    """Return a copy of indices, which has the same contents if they are known."""
    copy = indices.clone()
    answers.pass_on(indices, copy)
    return copy


def _bag_backward(*args: Any) -> Tensor:
    """Return the sparse gradient of an embedding bag's table, with one row for each index."""
    grad, indices, n_rows = args[0], args[1], args[6]
    rows = indices.view(1, -1).to(torch.long, copy=bags.has_padding(args))
    values = grad.new_empty((indices.numel(), grad.shape[1]))
    return torch.sparse_coo_tensor(rows, values, (n_rows, grad.shape[1]), check_invariants=False)


def like(sparse: Tensor, indices: Tensor, values: Tensor, coalesced: bool | None = None) -> Tensor:
    """Return a tensor like `sparse` with these indices and values."""
    is_coalesced = sparse.is_coalesced() if coalesced is None else coalesced
    return torch.sparse_coo_tensor(indices, values, sparse.shape, is_coalesced=is_coalesced, check_invariants=False)


def assumed(func: Any, args: Any) -> str | None:
    """Describe the assumption on which the size of an operator's sparse result depends; None if there is none."""
    if func is aten.add_.Tensor and all(map(is_sparse, args[:2])):
        return "a sparse tensor is assumed to stay as large as it was when another one is added"
    if func is bags.BACKWARD and args[9] and bags.has_padding(args):
        return "no index of a bag is assumed to be padding, which a sparse gradient leaves out"
    return None


KERNELS: dict[Any, Callable[..., Tensor]] = {
    aten.clone.default: _clone,
    aten._coalesce.default: _coalesce,
    aten.sparse_mask.default: _mask,
    aten.add.Tensor: _add,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
}
"""Kernels for operators on sparse tensors (COO)."""
