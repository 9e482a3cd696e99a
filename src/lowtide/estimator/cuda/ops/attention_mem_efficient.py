"""Memory-efficient attention: scratch memory of its kernels, by their tiles.

Torch runs the first kernel of a list that supports the head size and fits into the GPU's shared memory. For head sizes
up to 64 all candidates have the same tiles; for larger ones the tile sizes are known within bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide.estimator.cuda.current_gpu import capability
from lowtide.estimator.cuda.ops.attention import HALF
from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, cuda_op, ensure_entry

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_KERNELS = "torch/include/ATen/native/transformers/cuda/mem_eff_attention/{}, torch 2.13"

_FORWARD = Behaviour(
    name="memory-efficient attention",
    does="for half precision and heads above 128 the result in single precision; saves one number per row, padded to "
    "32; seed and offset stay on the CPU",
    source=_KERNELS.format("kernel_forward.h: kNeedsOutputAccumulatorBuffer, kAlignLSE; kernels/cutlassF.h"),
)
_BACKWARD = Behaviour(
    name="memory-efficient attention, backward",
    does="one number per row, computed from a whole product in single precision; gradients of queries in whole tiles "
    "with a lock each, in single precision too; gradients of keys and values, unless they stay in registers",
    source=_KERNELS.format("kernel_backward.h: workspace_size, kKernelComputesDelta; kernels/cutlassB.h")
    + "; aten/src/ATen/native/transformers/cuda/attention_backward.cu: _efficient_attention_backward, "
    "at the state with shared_storage_dqdkdv, as in torch 2.13",
    exact=False,
)

_HEAD_IN_REGISTERS = 128
_LOCK = 16
"""Bytes of the lock before each tile of the queries' gradients."""

_MANY = 256
_MOST_SPLITS = 200


class Tiles(NamedTuple):
    """Size of a thread block's tile in queries and keys; `in_registers` if it sums key gradients in registers."""

    queries: int
    keys: int
    in_registers: bool


def _list_tiles(dtype: torch.dtype, head: int, dropout: bool) -> list[Tiles]:
    """Return the tile sizes of the kernels that may run for this head size.

    The last of them fits into the shared memory of any GPU.
    """
    generation = capability()
    small = Tiles(64, 64, dtype in HALF and head <= 64)
    if head <= 64:
        return [small]
    if dtype in HALF and generation >= (8, 0):
        if head > 128:
            return [Tiles(128, 64, False), small]
        if head <= 96 and generation in ((8, 6), (8, 9)) and not dropout:
            return [Tiles(128, 64, True)]
        return [Tiles(128, 128, True), small]
    if dtype in HALF and generation >= (7, 0):
        return [Tiles(128, 64, head <= 128), small]
    return [Tiles(128, 64, False), small] if dtype is torch.float32 and generation >= (8, 0) else [small]


def _count_workspace_bytes(tiles: Tiles, query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the bytes of the workspace in which a backward kernel stores partial sums of gradients."""
    pairs = query.shape[0] * query.shape[1]
    accumulates = query.dtype in HALF and not tiles.in_registers
    splits = -(-key.shape[2] // tiles.keys)
    if pairs >= _MANY and key.shape[2] <= 2 * tiles.keys:
        splits = 1
    if accumulates:
        splits = min(splits, _MOST_SPLITS // pairs)
    if splits < 1 or capability() < (7, 0) or _is_deterministic():
        splits = 1
    numbers = 0
    if accumulates:
        numbers += splits * tiles.keys * sum(_round_up(t.shape[-1], tiles.queries) for t in (key, value))
    if query.dtype in HALF or capability() >= (7, 0):
        n_tiles = -(-query.shape[2] // tiles.queries) * -(-query.shape[3] // tiles.keys)
        numbers += n_tiles * (tiles.queries * tiles.keys + _LOCK // 4)
    return pairs * _round_up(numbers, 4) * 4


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@cuda_op(aten._scaled_dot_product_efficient_attention.default, of=_FORWARD)
def forward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the block in which forward sums a half-precision result in float32; none if the sums fit in registers."""
    query, key, value = args[:3]
    if query.dtype not in HALF or max(key.shape[-1], value.shape[-1]) <= _HEAD_IN_REGISTERS:
        return []
    return [ScratchBlock.exactly(results[0].numel() * 4)]


@cuda_op(aten._scaled_dot_product_efficient_attention_backward.default, of=_BACKWARD)
def backward(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the scratch blocks of memory-efficient attention's backward: delta, temporaries for it, and the workspace.

    Delta is the result times its gradient, summed over each head. The result's gradient is copied first if it is not
    contiguous in the order batch, row, head; that copy is allocated before the gradients that backward returns.
    """
    gradient, query, key, value = args[:4]
    dropout = float(args[9]) > 0
    rows = query.shape[0] * query.shape[1] * query.shape[2]
    product = rows * value.shape[-1] * 4
    tiles = _list_tiles(query.dtype, max(query.shape[-1], value.shape[-1]), dropout)
    inside = []
    if not gradient.transpose(1, 2).is_contiguous():
        inside.append(ScratchBlock.exactly(gradient.numel() * gradient.element_size(), first=True))
    if query.dtype not in HALF:
        inside += [ScratchBlock.exactly(product, through=2), ScratchBlock.exactly(rows * 4, through=1)]
    elif capability()[0] == 7 and capability()[1] < 5 and not tiles[0].in_registers:  # no delta in Volta's kernels
        inside += [ScratchBlock.exactly(product, through=n) for n in (4, 3, 2)] + [
            ScratchBlock.exactly(rows * 4, through=1)
        ]
    inside.append(ScratchBlock.exactly(rows * 4))
    workspaces = [_count_workspace_bytes(tile, query, key, value) for tile in tiles]
    inside.append(ScratchBlock(workspaces[0], min(workspaces), max(workspaces)))
    return [block for block in inside if block.most]


ensure_entry(aten._scaled_dot_product_efficient_attention.default, of=_FORWARD).on_host = range(2, 4)  # seed and offset
