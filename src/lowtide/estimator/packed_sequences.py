"""Pack sequences of different lengths, and unpack them into one tensor, as torch does.

Follows aten/src/ATen/native/PackedSequence.cpp of torch 2.13. Torch's own function for unpacking writes lengths to
memory that a fake tensor does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lowtide._torch.pytree import tree_leaves


def list_batch_sizes(batch: Any) -> list[Tensor]:
    """Return the `batch_sizes` of packed sequences in a batch. torch keeps them on the CPU, whatever the device."""
    leaves = tree_leaves(batch, is_leaf=lambda node: isinstance(node, PackedSequence))
    return [leaf.batch_sizes for leaf in leaves if isinstance(leaf, PackedSequence)]


def copies(padded: Tensor, lengths: Sequence[int], batch_first: bool) -> list[int]:
    """Return the bytes of each copy that packing `padded` makes, in order. Each non-contiguous piece is copied."""
    steps_first = padded.transpose(0, 1) if batch_first else padded
    row_bytes = steps_first[0, 0].nbytes
    sizes, before = [], 0
    for place, length in enumerate(reversed(lengths)):
        n = len(lengths) - place
        if length > before and not steps_first[before:length, :n].is_contiguous():
            sizes.append((length - before) * n * row_bytes)
        before = length
    return sizes


def padded(data: Tensor, rows: Sequence[int], batch_first: bool, padding_value: float, total_length: int) -> Tensor:
    """Unpack `data` into one padded tensor of shape [steps, batch, ...], or [batch, steps, ...] if `batch_first`.

    `rows` states the number of sequences at each step.
    """
    steps = len(rows)
    out = data.new_full((max(total_length, steps), rows[0], *data.shape[1:]), padding_value)
    begin, offset = 0, 0
    for end in range(1, steps + 1):
        if end < steps and rows[end] == rows[begin]:
            continue
        n = (end - begin) * rows[begin]
        block = data[offset : offset + n].view(end - begin, rows[begin], *data.shape[1:])
        out[begin:end, : rows[begin]].copy_(block)
        begin, offset = end, offset + n
    return out.transpose(0, 1) if batch_first else out


def lengths(rows: Sequence[int]) -> list[int]:
    """Return the length of each packed sequence, longest first. `rows` states the number of sequences at each step."""
    return [sum(n > row for n in rows) for row in range(rows[0])]
