"""Operators by what a rehearsal has to know of them (torch 2.13)."""

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
"""What autograd's own code calls in place of the operator that writes to its first argument (torch 2.13)."""

IN_FORMULA = {
    "BinaryCrossEntropyWithLogitsBackward0": frozenset({aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}),
}
"""By a node's name, what its formula writes over what it has computed so far, but not under a mode (torch 2.13)."""

CONTIGUOUS = frozenset({aten.native_layer_norm.default, aten.native_layer_norm_backward.default})
"""Operators whose results the CPU lays out contiguously, and fake tensors like their arguments (torch 2.13)."""

BATCH_NORMED = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}
"""Operators whose first result the CPU lays out contiguously, but with the channels last where the argument at this
place has them there. Fake tensors keep any strides in one of them, and none in the other (torch 2.13)."""

GROUPED = aten._grouped_mm.default
"""Of which fake tensors know only bfloat16 (torch 2.13)."""

NOT_IN_HEALTH = frozenset({aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default})
ALL_OR_ANY = frozenset({aten.all.default, aten.any.default})
PACKING = aten._pack_padded_sequence.default
"""The only operator that gives a tensor on the CPU beside one on a GPU."""
BY_INTEGERS = frozenset({aten._ctc_loss.default, aten._ctc_loss.Tensor, PACKING})
"""Operators whose results' shapes depend on contents, but not on those of floating-point arguments."""
LESS = frozenset({aten.le.Scalar, aten.lt.Scalar, aten.le.Tensor, aten.lt.Tensor})
MORE = frozenset({aten.ge.Scalar, aten.gt.Scalar, aten.ge.Tensor, aten.gt.Tensor})
COMPARING = frozenset({aten.equal.default, aten.allclose.default})
"""Operators that give yes or no."""
BY_SHAPE = frozenset(
    {
        *(aten.ones_like.default, aten.zeros_like.default, aten.full_like.default),
        *(aten.new_ones.default, aten.new_zeros.default, aten.new_full.default),
    }
)
"""Operators to whose results the contents of their arguments do not matter."""
CHOICES = frozenset({aten.topk.default, aten.argmax.default, aten.max.dim})
GATHERING = frozenset(
    {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default, aten.take.default}
)
"""Operators that take elements of their first argument, and do not read the others."""
NORMED_BY_BATCH = frozenset(
    {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}
)
RUNNING, TRAINING = (3, 4), 5
"""Places of arguments of these: running mean and variance, which they write to without saying so, in training only."""
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
