"""Fused attention. With dropout its result is kept, because random numbers must not be drawn again."""

from __future__ import annotations

from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe

EDGES = {"query": 0, "key": 1, "value": 2}
NO_DROPOUT = {"dropout_p": 0.0}


@recipe("ScaledDotProductFlashAttentionForCpuBackward0", edges=EDGES, when=NO_DROPOUT, expensive=True, device="cpu")
def flash_attention_for_cpu(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *, is_causal: bool, scale: float | None
) -> Tensor:
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


@recipe("ScaledDotProductFlashAttentionBackward0", edges=EDGES, when=NO_DROPOUT, expensive=True, device="cuda")
def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)[0]


@recipe("ScaledDotProductEfficientAttentionBackward0", edges=EDGES, when=NO_DROPOUT, expensive=True, device="cuda")
def efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, *, is_causal: bool, scale: float | None
) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_bias, True, 0.0, is_causal, scale=scale
    )[0]


@recipe("ScaledDotProductCudnnAttentionBackward0", edges=EDGES, when=NO_DROPOUT, expensive=True, device="cuda")
def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, *, is_causal: bool, scale: float | None
) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, attn_bias, True, 0.0, is_causal, False, scale=scale
    )[0]
