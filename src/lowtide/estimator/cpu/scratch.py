"""Scratch memory of CPU operators, by rules that follow the kernels' source and are tested against measurements.

Each rule returns the bytes that the kernels of torch 2.13 allocate in addition to the results. Operators without
scratch memory are listed in `no_scratch_ops.py`. All others run once in a trial (`scratch_trials.py`): operators that
call others internally, and operators of oneDNN, whose formats and scratch memory depend on the processor and on the
number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.fake_modes import OWN_OPERATORS, SHARDING_OPERATORS, is_strided
from lowtide._torch.tensors import find_parts
from lowtide.estimator import embedding_bag as bags
from lowtide.estimator.cpu.no_scratch_ops import takes_nothing
from lowtide.estimator.cpu.scratch_trials import Trials

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

Rule = Callable[[Any, Any, list["Tensor"]], list[int] | None]
"""Function of args, kwargs and results that returns the bytes of each scratch block alive at the operator's peak.

It returns None if the bytes depend on more than its arguments. The operator is then run in a trial.
"""


_BY_CONTENTS = (aten.linalg_matrix_exp.default,)
"""Operators whose scratch memory depends on contents: `matrix_exp` keeps more powers if the values are larger."""


class Scratch:
    """Scratch memory of operators on `device`. `unknown` describes the memory that is not known."""

    def __init__(self, device: str, trials: Trials) -> None:
        self._device = device
        self._trials = trials
        self.unknown = () if device == "cpu" else (f"what kernels of {device} allocate and free inside",)

    def of(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]
    ) -> tuple[dict[int, int], list[int]]:
        """Return corrected sizes of an operator's results, and the sizes of its scratch blocks, all in bytes.

        The first part maps positions in `results` to bytes, for results whose real storage differs in size from the
        fake one.
        """
        if func is aten._efficientzerotensor.default:
            return {0: 0}, []
        if self._device != "cpu" or func.namespace in SHARDING_OPERATORS:
            return {}, []
        if func in REDUCED_LATE and not results[0].dim():
            return {0: args[0].numel() * args[0].element_size()}, []
        if func in _BY_CONTENTS:
            self._trials.leave(func, args, kwargs)  # an operator that is tried counts as in the trial
        if func.namespace not in OWN_OPERATORS:
            self._trials.leave(func, args, kwargs)  # a custom operator may allocate more
            return {}, []
        rule = RULES.get(func)
        if rule is None and takes_nothing(func, tensors, results):
            return {}, []
        sizes = None if rule is None else rule(args, kwargs, results)
        return self._trials.of(func, args, kwargs) if sizes is None else ({}, [n for n in sizes if n])


def _make_copy_rule(*places: int) -> Callable[[Any, Any, list[Tensor]], list[int]]:
    """Return a rule for kernels that copy the arguments at `places` if they are not contiguous."""

    def rule(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
        given = (args[place] for place in places if args[place] is not None)
        return [tensor.nbytes for tensor in given if not tensor.is_contiguous()]

    return rule


def _count_promotions(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the bytes of casts in arithmetic: a copy of each operand that does not have the common dtype.

    Scalar operands are not cast.
    """
    one, other = args[:2]
    dtype = torch.result_type(one, other)
    if results[0].dtype.is_floating_point and not dtype.is_floating_point:  # integers are divided in floating point
        dtype = results[0].dtype
    return [
        operand.numel() * dtype.itemsize
        for operand in (one, other)
        if isinstance(operand, torch.Tensor) and operand.dim() and operand.dtype != dtype
    ]


def _count_input_cast(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    return [] if args[0].dtype == results[0].dtype else [args[0].numel() * results[0].dtype.itemsize]


def _safe_softmax(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of safe softmax: a mask of -inf elements, and a mask of rows that are all -inf.

    A copy of a non-contiguous input, which is freed before, counts instead if it is larger.
    """
    numel = args[0].numel()
    masks = [numel, numel // max(args[0].shape[args[1]], 1)]
    return max(masks, _make_copy_rule(0)(args, kwargs, results), key=sum)


def _roll(args: Any, kwargs: Any, results: list[Tensor]) -> list[int] | None:
    """Return the bytes of `roll`'s intermediate results, one for each rolled dimension except the last.

    Return None if `dims` is not given, because the tensor is flattened then; a trial determines the bytes.
    """
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    return [results[0].nbytes] * (len(dims) - 1) if dims else None


def _batch_norm_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int] | None:
    return [args[1].nbytes] if args[1].is_contiguous() else None


def _layer_norm_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of layer norm's backward.

    They consist of copies of the gradient and the input if these are not contiguous, and of each thread's partial sums
    if the gradient of weight or bias is needed.
    """
    normed = math.prod(args[2])
    sums = 2 * torch.get_num_threads() * normed * args[1].element_size() if any(args[-1][1:]) else 0
    return [*_make_copy_rule(0, 1)(args, kwargs, results), sums]


def _group_norm_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of group norm's backward: two sums for each channel of each example."""
    examples, channels = args[5:7]
    return [2 * examples * channels * results[0].element_size()]


def _logsumexp(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of `logsumexp`: the exponentials of all elements, and the maximum for each result."""
    return [args[0].numel() * results[0].element_size(), results[0].nbytes]


def _upsample(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the bytes of the channels-last copies of input and result that the kernel makes for small images.

    The kernel is in UpSampleKernel.cpp.
    """
    is_small = sum(results[0].shape[-2:]) <= _SMALL_IMAGE
    if not is_small or args[0].is_contiguous(memory_format=torch.channels_last):
        return []
    return [args[0].nbytes, results[0].nbytes]


_SMALL_IMAGE = 128
"""Largest sum of rows and columns of a small image."""


def _upsample_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the bytes of a copy of the gradient, unless it is contiguous or channels-last."""
    return [] if args[0].is_contiguous(memory_format=torch.channels_last) else _make_copy_rule(0)(args, kwargs, results)


def _flash(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of flash attention: each thread's tiles of scores and results, row maxima and row sums.

    The kernel is in FlashAttentionKernel.cpp.
    """
    query, key, value = args[:3]
    rows, columns = _choose_tile(query, key)
    floats = rows * (columns + 2 + value.shape[-1]) * torch.get_num_threads()
    reduced = query.dtype in (torch.bfloat16, torch.float16)
    return [floats * 4, rows * columns * query.element_size() * torch.get_num_threads() if reduced else 0]


def _flash_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of flash attention's backward: two tiles of scores per thread, and one tile's row sums.

    Half-precision inputs need a second copy of the tiles in their own dtype.
    """
    query, key = args[1:3]
    rows, columns = _choose_tile(query, key)
    tiles = 2 * rows * columns * torch.get_num_threads()
    reduced = query.dtype in (torch.bfloat16, torch.float16)
    return [tiles * 4, rows * 4, tiles * query.element_size() if reduced else 0]


def _choose_tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    length = query.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, key.shape[2])


def _count_factor_copies(args: Any, kwargs: Any, results: list[Tensor]) -> list[int] | None:
    """Return the bytes of copies of a product's factors that BLAS can't read; None if a trial must determine them.

    BLAS needs contiguous rows or columns. In a batched product, matrices are copied one at a time, so one matrix of
    each factor counts (LinearAlgebra.cpp: addmm_impl_cpu_). Batches of small matrices do not use BLAS and need no
    copies (bmm_out_or_baddbmm_).
    """
    factors, result = args[-2:], results[0]
    is_reduced = any(factor.dtype in (torch.bfloat16, torch.float16) for factor in factors)
    if is_reduced or not all(map(is_strided, factors)):  # for oneDNN, or for sparse matrices
        return None
    if result.dim() == 3 and factors[0].shape[2] * result.shape[1] * result.shape[2] < _SMALLEST_OF_BLAS:
        return []
    matrices = [t for t in factors if t.dim() > 1 and not blas_reads(t)]
    return [matrix.shape[-2] * matrix.shape[-1] * matrix.element_size() for matrix in matrices]


_SMALLEST_OF_BLAS = 400
"""BLAS is used if each product of a batch takes at least this number of multiplications."""


def blas_reads(factor: Tensor) -> bool:
    """Return True if BLAS can read `factor` without a copy: its rows or its columns are contiguous and disjoint."""
    (down, across), (rows, columns) = factor.stride()[-2:], factor.shape[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def _count_sort_buffers(args: Any, kwargs: Any, results: list[Tensor]) -> list[int]:
    """Return the scratch bytes of `coalesce`: one flat index and one position per element, and the sort's buffers.

    The kernel is in SparseTensor.cpp.
    """
    indices, _ = find_parts(args[0])
    n_bytes = indices.shape[1] * indices.element_size()
    return [n_bytes] * (3 if indices.shape[0] == 1 else 4)


REDUCED_LATE = frozenset(
    {
        *(aten.mse_loss.default, aten.smooth_l1_loss.default),
        *(aten.binary_cross_entropy.default, aten.soft_margin_loss.default),
    }
)
"""Losses whose kernels write all elements to the result's storage before they reduce them to one number."""

RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Tensor),
            *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.maximum.default),
        ),
        _count_promotions,
    ),
    **dict.fromkeys(
        (
            *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default),
            *(aten.mv.default, aten.addmv.default),
        ),
        _count_factor_copies,
    ),
    aten._coalesce.default: _count_sort_buffers,
    aten.cumsum.default: _count_input_cast,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax.default: _make_copy_rule(0),
    aten._log_softmax.default: _make_copy_rule(0),
    aten._softmax_backward_data.default: _make_copy_rule(0, 1),
    aten._log_softmax_backward_data.default: _make_copy_rule(0, 1),
    aten.native_layer_norm.default: _make_copy_rule(0, 2, 3),
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.logsumexp.default: _logsumexp,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.roll.default: _roll,
    aten.embedding.default: _make_copy_rule(1),
    aten.embedding_dense_backward.default: _make_copy_rule(0, 1),
    **dict.fromkeys((aten._embedding_bag.default, aten._embedding_bag_forward_only.default), bags.forward),
    bags.BACKWARD: bags.backward,
    aten._embedding_bag_per_sample_weights_backward.default: bags.weights_backward,
    aten.upsample_nearest2d.default: _upsample,
    aten.upsample_bilinear2d.default: _upsample,
    aten.upsample_nearest2d_backward.default: _upsample_backward,
    aten.upsample_bilinear2d_backward.default: _upsample_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
}
