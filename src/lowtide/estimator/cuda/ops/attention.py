"""Attention: the choice among CUDA's kernels, and the memory of each.

`scaled_dot_product_attention` runs the first kernel, in an order of preference, that supports the call. Torch without
CUDA would run none of them and store all attention scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.modes import attention_allowed
from lowtide.estimator.cuda.current_gpu import capability, to_gpu
from lowtide.estimator.cuda.ops.op_registry import Behaviour, cuda_kernel

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

_CHOICE = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.13"

Behaviour(
    name="attention kernel",
    does="cuDNN (9.x, 10.x), flash, memory-efficient, or the kernel that stores all scores; chosen by dtype, mask, "
    "head size and compute capability",
    source=_CHOICE,
)
Behaviour(
    name="attention mask",
    does="a boolean mask is converted to numbers; a mask whose rows are not a multiple of 8 long is padded",
    source="aten/src/ATen/native/transformers/attention.cpp: preprocess_mask, torch 2.13",
)

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a `scaled_dot_product_attention` call, by which torch chooses the CUDA kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    grouped: bool

    @property
    def needs_gradient(self) -> bool:
        """True if gradients are enabled and query, key or value requires one."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def heads(self) -> tuple[int, ...]:
        """Head sizes of query, key and value."""
        return tuple(t.shape[-1] for t in self.tensors)


def choose_kernel(call: Call) -> str:
    """Return the kernel that torch chooses on CUDA: "cudnn", "flash", "efficient" or "math" (select_sdp_backend)."""
    order: tuple[str, ...] = ("flash", "efficient", "math")
    if capability()[0] in (9, 10):  # check_prefer_cudnn_attention, with the cuDNN that torch's wheels bring
        order = ("cudnn", *order)
    return next((name for name in order if _CAN[name](call)), "math")


def _is_fusible(call: Call) -> bool:
    """Return True if the call meets the conditions of every kernel except "math"."""
    query, key, value = call.tensors
    if any(t.dim() != 4 or not t.numel() or (t.stride(-1) != 1 and t.shape[-1] != 1) for t in call.tensors):
        return False
    if call.mask is not None and call.mask.stride(-1) != 1:  # for example a permuted bias, in T5
        return False
    if query.shape[0] != key.shape[0] or query.shape[0] != value.shape[0]:
        return False
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    return same_heads or (call.grouped and query.shape[1] % key.shape[1] == 0 == query.shape[1] % value.shape[1])


def _has_half_dtype(call: Call) -> bool:
    return call.query.dtype in (HALF if capability()[0] >= 8 else (torch.float16,))


def _can_cudnn(call: Call) -> bool:
    query, key, _ = call.tensors
    return (
        attention_allowed("cudnn")
        and _is_fusible(call)
        and _has_half_dtype(call)
        and capability() >= (8, 0)
        and all(size <= 128 and size % 8 == 0 for size in call.heads)
        and key.shape[2] > 1
        and (call.dropout == 0 or (query.shape[2] > 1 and (call.dropout * 16).is_integer()))
        and not torch.are_deterministic_algorithms_enabled()
    )


def _can_flash(call: Call) -> bool:
    head = call.heads[0]
    grad_limit = capability() in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1)) and call.needs_gradient
    return (
        attention_allowed("flash")
        and _is_fusible(call)
        and call.mask is None
        and len(set(call.heads)) == 1
        and head <= 256
        and capability() >= (8, 0)
        and (not grad_limit or head <= 192 or (call.dropout == 0 and head > 224))
        and (not call.causal or call.query.shape[2] == call.key.shape[2])
        and _has_half_dtype(call)
    )


def _can_efficient(call: Call) -> bool:
    query, key, value = call.tensors
    known = (*HALF, torch.float32) if capability()[0] >= 8 else (torch.float16, torch.float32)
    alignment = 8 if query.dtype in HALF and capability()[0] >= 7 else 4 if capability()[0] >= 8 else 1
    return (
        attention_allowed("efficient")
        and _is_fusible(call)
        and query.dtype in known
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0 == value.shape[-1] % alignment
        and (capability()[0] < 8 or all(t.storage_offset() % alignment == 0 for t in call.tensors))
    )


_CAN: dict[str, Callable[[Call], bool]] = {
    "cudnn": _can_cudnn,
    "flash": _can_flash,
    "efficient": _can_efficient,
    "math": lambda call: True,
}


@cuda_kernel("scaled_dot_product_attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run attention with the kernel that CUDA would choose, in place of aten::scaled_dot_product_attention."""
    query, key, value = map(to_gpu, (query, key, value))
    attn_mask = None if attn_mask is None else to_gpu(attn_mask)
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = choose_kernel(call)
    mask = _convert_bool_mask(attn_mask, query.dtype)
    if kernel == "flash":
        head = query.shape[-1]
        if head % 8:
            query, key, value = (torch.nn.functional.pad(t, (0, -head % 8)) for t in call.tensors)
            scale = head**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head] if head % 8 else out
    if kernel == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if enable_gqa and kernel == "efficient":
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if mask is not None:
        mask = _pad_mask(mask).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    run = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    return run(query, key, value, mask, call.needs_gradient, dropout_p, is_causal, scale=scale)[0]


def _convert_bool_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=dtype, device=mask.device))


def _pad_mask(mask: Tensor) -> Tensor:
    """Return `mask`, copied if need be so that each row begins at a multiple of 8 elements, as the kernel requires."""
    length = mask.shape[-1]
    if not length % 8:
        return mask
    padded: Tensor = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return padded
