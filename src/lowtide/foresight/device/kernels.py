"""Operators for which CUDA has a kernel of its own, where torch without CUDA would compose others.

Registered once for each process, and only for the device of rehearsals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_libraries: list[torch.library.Library] = []
"""Registrations last as long as these live."""


def register() -> None:
    """Put the kernels in their places."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "AutogradPrivateUse1")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    head = query.shape[-1]
    if query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None and head <= 256:
        width = -head % 8
        if width:
            query, key, value = (torch.nn.functional.pad(t, (0, width)) for t in (query, key, value))
        scale = head**-0.5 if scale is None else scale
        out: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :head] if width else out
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
        del zero
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs = any(t.requires_grad for t in (query, key, value)) and torch.is_grad_enabled()
    found: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs, dropout_p, is_causal, scale=scale
    )[0]
    return found


class _RmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm: saves its input and one number for each row."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        rows = (*x.shape[: x.dim() - len(shape)], *[1] * len(shape))
        dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        out = torch.empty_like(x)
        rstd = torch.empty(rows, dtype=dtype, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return dx, None, dw, None


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    return _RmsNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]


_KERNELS: dict[str, Any] = {
    "scaled_dot_product_attention": _attention,
    "_fused_rms_norm": _rms_norm,
}
