"""Sets of operators that need special treatment in a rehearsal (torch 2.13)."""

from __future__ import annotations

import torch

aten = torch.ops.aten

INPLACE_OTHERWISE = frozenset(
    {
        aten.add.Tensor,
        aten.index_put.default,
        aten._index_put_impl.default,
        aten.index_add.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
        aten.masked_fill.Scalar,
        aten.slice_scatter.default,
        aten.select_scatter.default,
    }
)
"""Operators that autograd calls under a dispatch mode instead of their in-place variants (torch 2.13)."""

IN_FORMULA = {
    "BinaryCrossEntropyWithLogitsBackward0": frozenset({aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}),
}
"""Node name -> operators that its backward formula runs in place on intermediates, except under a mode (2.13)."""

CONTIGUOUS = frozenset({aten.native_layer_norm.default, aten.native_layer_norm_backward.default})
"""Operators whose results are contiguous on the CPU, but have the arguments' strides with fake tensors (2.13)."""

BATCH_NORMED = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}
"""Operators whose first result on the CPU is channels-last if the argument at this position is, else contiguous.

On fake tensors, the forward keeps any strides, and the backward keeps none (torch 2.13).
"""

GROUPED = aten._grouped_mm.default
"""Grouped matrix product; its fake kernel accepts only bfloat16 (torch 2.13)."""

PRODUCTS = frozenset({aten.mm.default, aten.addmm.default})
"""Matrix products whose fake kernels accept operands of several dtypes, unlike the real kernels (torch 2.13)."""

NOT_IN_HEALTH = frozenset({aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default})
ALL_OR_ANY = frozenset({aten.all.default, aten.any.default})
PACKING = aten._pack_padded_sequence.default
"""The only operator that returns a CPU tensor along with one on a GPU."""
BY_INTEGERS = frozenset({aten._ctc_loss.default, aten._ctc_loss.Tensor, PACKING})
"""Operators whose result shapes depend on the contents of their integer arguments only."""
LESS = frozenset({aten.le.Scalar, aten.lt.Scalar, aten.le.Tensor, aten.lt.Tensor})
MORE = frozenset({aten.ge.Scalar, aten.gt.Scalar, aten.ge.Tensor, aten.gt.Tensor})
COMPARING = frozenset({aten.equal.default, aten.allclose.default})
"""Operators that return True or False."""
BY_SHAPE = frozenset(
    {
        *(aten.ones_like.default, aten.zeros_like.default, aten.full_like.default),
        *(aten.new_ones.default, aten.new_zeros.default, aten.new_full.default),
    }
)
"""Operators whose results do not depend on the contents of their arguments."""
CHOICES = frozenset({aten.topk.default, aten.argmax.default, aten.max.dim})
GATHERING = frozenset(
    {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default, aten.take.default}
)
"""Operators that read only the selected elements of their first argument."""
NORMED_BY_BATCH = frozenset(
    {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
)
RUNNING, TRAINING = (3, 4), 5
"""Argument positions in NORMED_BY_BATCH: the running statistics, and the training flag. Training writes to the running
statistics although the operator's schema does not say so.
"""
EMPTY = frozenset(
    {
        *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default),
        *(aten.new_empty.default, aten.new_empty_strided.default),
    }
)
INDEXING = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
PUTTING = frozenset(
    {
        *(aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default),
        *(aten._index_put_impl.default, aten._index_put_impl_.default),
    }
)
