"""Sparse tensors: what they are made of when operators make them of others.

Torch's own kernels for tensors without contents give sparse ones without elements (torch 2.13). Which indices are the
same is known where they are from the batch; else they are taken to differ, and not to be padding: what is made of a
sparse tensor has as many elements. Not yet: a gradient that another one is added to in place, as by a second backward
pass, stays as large as it was, which is said.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.fake_modes import on_real_tensors
from lowtide._torch.tensors import parts_of
from lowtide.estimator import embedding_bag as bags

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.values.assumptions import ValueOracle

aten = torch.ops.aten


def parts(tensors: list[Tensor]) -> list[Tensor]:
    """These, sparse ones as their indices and values."""
    return [part for t in tensors for part in ((t,) if t.layout is torch.strided else parts_of(t))]


def is_sparse(arg: Any) -> bool:
    """Whether it is a sparse tensor (COO)."""
    return isinstance(arg, torch.Tensor) and arg.layout is torch.sparse_coo


def is_compressed(tensor: Tensor) -> bool:
    """Whether it is one of the other layouts, as CSR, of which torch's fake tensors have no elements."""
    return tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def with_parts(sparse: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A sparse tensor whose indices and values are others."""
    indices, values = map(change, parts_of(sparse))
    return like(sparse, indices, values)


def kernel(
    func: Any, args: Any, answers: ValueOracle, *, by_autograd: Callable[[], bool]
) -> Callable[..., Tensor] | None:
    """What gives the result of an operator; None where torch's own does, for nothing there is sparse."""
    if func is bags.BACKWARD and args[9]:
        return _bag_backward
    if func not in KERNELS or not any(map(is_sparse, args[:2])):
        return None
    if func is aten.clone.default and all(part.is_contiguous() for part in parts_of(args[0])) and by_autograd():
        return _take_over
    return partial(KERNELS[func], answers)


def _take_over(sparse: Tensor, **options: Any) -> Tensor:
    """As autograd keeps a gradient, where under a mode it copies it.

    torch/csrc/autograd/functions/accumulate_grad.h: AccumulateGrad::accumulateGrad, torch 2.13.
    """
    indices, values = parts_of(sparse)
    return like(sparse, indices, values)


def _clone(answers: ValueOracle, sparse: Tensor, **options: Any) -> Tensor:
    indices, values = parts_of(sparse)
    return like(sparse, _copy(answers, indices), values.clone())


def _coalesce(answers: ValueOracle, sparse: Tensor) -> Tensor:
    """On the CPU there is room for all elements (SparseTensor.cpp: _coalesce_sparse_cpu, torch 2.13)."""
    indices, values = parts_of(sparse)
    known = answers.value(indices)
    if known is None:
        return like(sparse, indices.clone(), torch.empty_like(values), coalesced=True)
    with on_real_tensors():
        different = torch.unique(known, dim=1)
    count = different.shape[1]
    has_room = sparse.device.type == "cpu"
    there = torch.empty_like(indices if has_room else indices[:, :count])[:, :count]
    answers.learn(there, different)
    inside = torch.empty_like(values if has_room else values[:count])[:count]
    return like(sparse, there, inside, coalesced=True)


def _mask(answers: ValueOracle, tensor: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The elements of a tensor where `mask` has some."""
    indices, values = parts_of(mask)
    return like(mask, _copy(answers, indices), torch.empty_like(values, dtype=tensor.dtype))


def _transpose(answers: ValueOracle, sparse: Tensor, one: int = 0, other: int = 1) -> Tensor:
    """A copy with rows of the indices exchanged (SparseTensor.cpp: transpose_sparse, of a clone; torch 2.13)."""
    indices, values = parts_of(sparse)
    one, other = one % sparse.dim(), other % sparse.dim()
    rows, shape = [*range(len(indices))], [*sparse.shape]
    for each in (rows, shape):  # torch takes no others than sparse dimensions
        each[one], each[other] = each[other], each[one]
    copy = indices.clone()
    if (known := answers.value(indices)) is not None:
        with on_real_tensors():
            found = known[rows]
        answers.learn(copy, found)
    return torch.sparse_coo_tensor(copy, values.clone(), shape, is_coalesced=False, check_invariants=False)


def _add(answers: ValueOracle, sparse: Tensor, other: Tensor, **options: Any) -> Tensor:
    """The elements of both; a sum with a dense tensor is dense."""
    if sparse.layout is not other.layout:
        dense = other if sparse.layout is torch.sparse_coo else sparse
        return torch.empty_like(dense, dtype=torch.result_type(sparse, other))
    (indices, values), (more, added) = (tuple(parts_of(each)) for each in (sparse, other))
    both = torch.cat([indices, more], 1)
    known = answers.value(indices), answers.value(more)
    if known[0] is not None and known[1] is not None:
        with on_real_tensors():
            found = torch.cat([known[0], known[1]], 1)
        answers.learn(both, found)
    return like(sparse, both, torch.cat([values, added]), coalesced=False)


def _copy(answers: ValueOracle, indices: Tensor) -> Tensor:
    """One that is known if these are."""
    copy = indices.clone()
    answers.pass_on(indices, copy)
    return copy


def _bag_backward(*args: Any) -> Tensor:
    """One row of the table's gradient for each index."""
    grad, indices, n_rows = args[0], args[1], args[6]
    rows = indices.view(1, -1).to(torch.long, copy=bags.has_padding(args))
    values = grad.new_empty((indices.numel(), grad.shape[1]))
    return torch.sparse_coo_tensor(rows, values, (n_rows, grad.shape[1]), check_invariants=False)


def like(sparse: Tensor, indices: Tensor, values: Tensor, coalesced: bool | None = None) -> Tensor:
    """A tensor as `sparse`, of these parts."""
    is_coalesced = sparse.is_coalesced() if coalesced is None else coalesced
    return torch.sparse_coo_tensor(indices, values, sparse.shape, is_coalesced=is_coalesced, check_invariants=False)


def assumed(func: Any, args: Any) -> str | None:
    """What is taken to be so, where that changes how large a sparse tensor is."""
    if func is aten.add_.Tensor and all(map(is_sparse, args[:2])):
        return "a sparse tensor that another one is added to is taken to stay as large as it was"
    if func is bags.BACKWARD and args[9] and bags.has_padding(args):
        return "no index of a bag is taken to be padding, of which a sparse gradient has nothing"
    return None


KERNELS: dict[Any, Callable[..., Tensor]] = {
    aten.clone.default: _clone,
    aten._coalesce.default: _coalesce,
    aten.sparse_mask.default: _mask,
    aten.add.Tensor: _add,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
}
"""For operators that are given a sparse tensor (COO)."""
