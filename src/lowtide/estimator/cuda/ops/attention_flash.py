"""Scratch memory of flash attention and of cuDNN's attention.

If there are few thread blocks, the kernel splits the keys among more of them to keep all multiprocessors busy. The
table of GPUs does not state the number of multiprocessors, so the number of splits is known only within bounds. The
upper bound is counted.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, cuda_op

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_SOURCE = "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: {}, torch at commit ef3d5c9ebba1"

_FORWARD = Behaviour(
    name="flash attention",
    does="saves one number per row; without dropout, few rows and many keys are split over the keys: partial results "
    "in single precision",
    source=_SOURCE.format("mha_fwd, set_params_splitkv, num_splits_heuristic"),
    exact=False,
)
_BACKWARD = Behaviour(
    name="flash attention, backward",
    does="sums the gradients of queries in single precision, padded to 128 rows and heads of a multiple of 32 (once "
    "per wave of multiprocessors if deterministic), plus one number per row; shared keys get a gradient for each"
    " head; the result and its gradient are copied unless rows come before heads in memory",
    source=_SOURCE.format("mha_bwd") + "; attention_backward.cu: _flash_attention_backward",
    exact=False,
)
_CUDNN = Behaviour(
    name="cuDNN attention",
    does="workspaces that cuDNN chooses (get_workspace_size): none counted in forward, gradients of queries in single"
    " precision in backward; assumed to be at most three times that, which no document states",
    source="aten/src/ATen/native/cudnn/MHA.cpp: run_cudnn_SDP_fprop, torch at commit c8d6fb3acbf7",
    exact=False,
)

_MULTIPROCESSORS = range(4, 193)
"""Numbers of multiprocessors of the GPUs that flash attention runs on."""

_MOST_SPLITS = 128


def _choose_splits(blocks: int, parts: int, processors: int) -> int:
    """Return the number of parts into which flash attention splits the keys (num_splits_heuristic).

    It is the smallest number that keeps the multiprocessors at least 85 % as busy as the best number does. `blocks` is
    the number of thread blocks without a split, `parts` the largest number of splits, `processors` the number of
    multiprocessors.
    """
    slots = 2 * processors
    if blocks >= 0.8 * slots:
        return 1
    eligible = [n for n in range(1, min(_MOST_SPLITS, slots, parts) + 1) if n == 1 or _changes_part_size(parts, n)]
    busy = {n: (blocks * n / slots) / ceil(blocks * n / slots) for n in eligible}
    return next(n for n in eligible if busy[n] >= 0.85 * max(busy.values()))


def _changes_part_size(parts: int, n: int) -> bool:
    return -(-parts // n) != -(-parts // (n - 1))


@cache
def _bound_splits(blocks: int, parts: int) -> tuple[int, int]:
    if parts == 1:
        return 1, 1
    splits = [_choose_splits(blocks, parts, processors) for processors in _MULTIPROCESSORS]
    return min(splits), max(splits)


@cuda_op(aten._scaled_dot_product_flash_attention.default, of=_FORWARD)
def forward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of flash attention's forward; none with dropout, or if the keys are not split.

    For each split and each query row, the blocks hold one float32 number and a partial result in float32.
    """
    query, key = args[:2]
    if len(args) > 3 and args[3] > 0:
        return []
    batch, heads, length, head = query.shape
    if length == 1 and heads > key.shape[1]:  # groups of queries count as rows of their keys
        heads, length = key.shape[1], heads // key.shape[1]
    columns = 256 if head <= 64 else 128 if head <= 128 else 64
    least, most = _bound_splits(batch * heads * -(-length // 64), -(-key.shape[2] // columns))
    rows = batch * heads * length * 4
    widths = _bound_padded_size(head)
    scratch = []
    for width in ((1, 1), widths):
        least_bytes, most_bytes = (n * rows * w if n > 1 else 0 for n, w in zip((least, most), width, strict=True))
        scratch.append(ScratchBlock(most_bytes, least_bytes, most_bytes))
    return [inside for inside in scratch if inside.most]


def _bound_padded_size(head: int) -> tuple[int, int]:
    """Return the bounds of a head size padded to a multiple of 32; some kernel versions pad 224 further, to 256."""
    width = -(-head // 32) * 32
    return width, 256 if width == 224 else width


@cuda_op(aten._scaled_dot_product_flash_attention_backward.default, of=_BACKWARD)
def backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of flash attention's backward.

    The result and its gradient are copied unless they are contiguous in the order batch, row, head. The kernel has the
    buffers softmax_d and dq_accum. If query heads share keys and values, there are key and value gradients for each
    query head.
    """
    gradient, query, key = args[:3]
    batch, heads, length, head = query.shape
    rows = batch * heads * -(-length // 128) * 128 * 4
    least, most = (rows * width for width in _bound_padded_size(head))
    expected = most
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        least *= -(-_MULTIPROCESSORS[0] // (batch * heads))
        most *= -(-_MULTIPROCESSORS[-1] // (batch * heads))
        expected = most
    copied = [t for t in (gradient, args[4]) if not t.transpose(1, 2).is_contiguous()]
    inside = [ScratchBlock.exactly(t.numel() * t.element_size()) for t in copied]
    inside += [ScratchBlock.exactly(rows), ScratchBlock(expected, least, most)]
    if key.shape[1] != heads:
        inside += [ScratchBlock.exactly(batch * heads * key.shape[2] * head * query.element_size())] * 2
    return inside


@cuda_op(aten._scaled_dot_product_cudnn_attention_backward.default, of=_CUDNN)
def cudnn_backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the workspace of cuDNN attention's backward. Its size is known only within bounds."""
    query = args[1]
    n_bytes = query.numel() * 4
    return [ScratchBlock(n_bytes, 0, 3 * n_bytes)]
