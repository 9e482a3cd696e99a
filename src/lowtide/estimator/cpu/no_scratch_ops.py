"""Operators that allocate only their results on the CPU (torch 2.13)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator import sparse_tensors as sparse
from lowtide.estimator.op_sets import BY_INTEGERS

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten


def takes_nothing(func: Any, tensors: list[Tensor], results: list[Tensor]) -> bool:
    """Return True if an operator call with these tensors and results allocates no notable scratch memory."""
    if not tensors or _never_takes(func):
        return True
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return func in sparse.KERNELS
    if func in WHERE_CONTIGUOUS:
        return all(tensor.is_contiguous() for tensor in tensors)
    if func in POOLING:
        return all(tensor.is_contiguous() or _has_channels_last(tensor) for tensor in tensors)
    return _is_pointwise(func) and len(_list_number_dtypes(tensors) | _list_number_dtypes(results)) <= 1


@cache
def _never_takes(func: Any) -> bool:
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    return is_view or func in NEVER or func.namespace != "aten" or func.__name__.startswith(("_foreach", "_fused"))


@cache
def _is_pointwise(func: Any) -> bool:
    """Return True if an operator is a single loop over the elements, which casts only if dtypes are mixed."""
    return torch.Tag.pointwise in func.tags and func not in COMPOSED


def _list_number_dtypes(tensors: list[Tensor]) -> set[torch.dtype]:
    """Return the dtypes of the tensors that may be cast: all except masks and scalars."""
    return {tensor.dtype for tensor in tensors if tensor.dtype is not torch.bool and tensor.dim()}


def _has_channels_last(tensor: Tensor) -> bool:
    """Return True if a tensor has exactly the strides of channels-last, also in dimensions of size 1."""
    if tensor.dim() != 4:
        return False
    _, channels, height, width = tensor.shape
    return tensor.stride() == (channels * height * width, 1, channels * width, channels)


COMPOSED = frozenset(
    {
        *(aten.native_dropout_backward.default, aten.isinf.default, aten.mvlgamma.default, aten.ldexp.Tensor),
        *(aten.isclose.default, aten.gelu_backward.default),
    }
)
"""Operators tagged as pointwise that nevertheless allocate intermediate tensors."""

NEVER = frozenset(
    {
        # copies, and tensors like others
        *(aten.clone.default, aten.copy_.default, aten._to_copy.default, aten.cat.default, aten.stack.default),
        *(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten._unsafe_view.default, aten.set_.source_Tensor),
        *(aten.lift_fresh.default, aten.alias.default, aten.contiguous.default, aten.constant_pad_nd.default),
        *(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
        *(aten.new_empty.default, aten.new_empty_strided.default, aten.new_zeros.default, aten.new_ones.default),
        *(aten.new_full.default, aten.scalar_tensor.default, aten.repeat.default, aten.flip.default),
        *(aten.tril.default, aten.triu.default, aten.diag_embed.default, aten.diagonal_backward.default),
        *(aten.slice_backward.default, aten.select_backward.default, aten.slice_scatter.default),
        *(aten.select_scatter.default, aten.unfold_backward.default),
        # queries
        *(aten._local_scalar_dense.default, aten.equal.default, aten._linalg_check_errors.default),
        # reductions and selections
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.linalg_vector_norm.default),
        *(aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default),
        *(aten.all.default, aten.any.default, aten.any.dim, aten.all.dim, aten.var.correction, aten.std.correction),
        *(aten.var_mean.correction, aten.std_mean.correction, aten.dot.default, aten.topk.default),
        *(aten.prod.default, aten.prod.dim_int, aten.cumprod.default, aten.cummax.default, aten.cummin.default),
        # elements by their indices
        *(aten.gather.default, aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default),
        *(aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index_put.default),
        *(aten.index_add.default, aten.index_add_.default, aten.scatter.src, aten.scatter_.src, aten.scatter_.value),
        *(aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
        *(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.take.default),
        *(aten.nonzero.default, aten.bucketize.Tensor, aten.searchsorted.Tensor),
        # random numbers
        *(aten.bernoulli_.float, aten.bernoulli.default, aten.bernoulli.p, aten.uniform_.default, aten.normal_.default),
        *(aten.rand_like.default, aten.randn_like.default, aten.exponential_.default),
        # layers and losses
        *(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, aten.mse_loss_backward.default),
        *(aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default),
        *(aten.native_batch_norm.default, aten.native_group_norm.default, aten.glu.default, aten.glu_backward.default),
        *(aten.threshold_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default),
        *(aten.hardtanh_backward.default, aten.hardswish.default, aten.hardswish_backward.default),
        *(aten.hardsigmoid_backward.default, aten.softplus_backward.default, aten.log_sigmoid_backward.default),
        *BY_INTEGERS,
        aten.scatter_add_.default,
        *(aten.hardshrink_backward.default, aten.softshrink_backward.default, aten._adaptive_avg_pool3d.default),
        *(aten.mish_backward.default, aten._prelu_kernel.default, aten._prelu_kernel_backward.default),
    }
)

WHERE_CONTIGUOUS = frozenset(
    {
        *(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, aten.index_select.default),
        *(aten.log_sigmoid_forward.default, aten.max.default, aten.min.default, aten.gelu_backward.default),
        *(aten.reflection_pad1d.default, aten.reflection_pad1d_backward.default),
        *(aten.replication_pad1d.default, aten.replication_pad1d_backward.default),
        *(aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default),
        *(aten.replication_pad2d.default, aten.replication_pad2d_backward.default),
        *(aten.avg_pool3d.default, aten.avg_pool3d_backward.default),
    }
)
"""Operators whose only scratch is copies of non-contiguous arguments."""

POOLING = frozenset(
    {
        *(aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default),
        *(aten.avg_pool2d.default, aten.avg_pool2d_backward.default),
        *(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default),
    }
)
"""Operators whose only scratch is copies of arguments that are neither contiguous nor channels-last."""
