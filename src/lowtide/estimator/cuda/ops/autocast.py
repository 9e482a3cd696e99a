"""Autocast: precision of operators on CUDA, and the cache of casts.

The lists of operators are torch's own lists for CUDA, because torch has none for a custom backend. A cast copy of a
parameter lives until the outermost autocast ends, so that a parameter used twice is cast once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowtide._torch.privateuse1 import without_autocast
from lowtide.estimator.cuda.current_gpu import NAME, to_gpu
from lowtide.estimator.cuda.ops.op_registry import Behaviour

aten = torch.ops.aten

_SOURCE = "torch/include/ATen/autocast_mode.h: AT_FORALL_{}, torch 2.13"

Behaviour(
    name="autocast, lower precision",
    does="casts for convolutions, matrix products, recurrent cells and attention",
    source=_SOURCE.format("LOWER_PRECISION_FP"),
)
Behaviour(
    name="autocast, single precision",
    does="casts for norms, losses, exponentials, logarithms and resampling",
    source=_SOURCE.format("FP32"),
)
Behaviour(
    name="autocast, results in single precision",
    does="returns single precision from softmax, sums, products and norms along a dimension",
    source=_SOURCE.format("FP32_SET_OPT_DTYPE"),
)
Behaviour(
    name="autocast, widest",
    does="casts the operands of operators of several tensors to their widest dtype",
    source=_SOURCE.format("PROMOTE"),
)
Behaviour(
    name="autocast, cache",
    does="keeps casts of parameters that need a gradient until the outermost autocast ends",
    source="aten/src/ATen/autocast_mode.cpp: cached_cast, torch 2.13",
)

_LOWER = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
"""
_SINGLE = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
_SINGLE_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack
"""

_casts: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Cast copies of parameters, by parameter."""


def forget_casts() -> None:
    """Clear the cache of cast parameters, as torch does when the outermost autocast ends."""
    _casts.clear()


def kernels() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the kernel of each operator that autocast casts."""
    for names, make in (
        (_LOWER, _make_lower_kernel),
        (_SINGLE, _make_single_kernel),
        (_SINGLE_RESULT, _make_single_result_kernel),
        (_WIDEST, _make_widest_kernel),
    ):
        for name in names.split():
            packet, _, overload = name.partition(".")
            yield name, make(getattr(getattr(aten, packet), overload or "default"))


def _make_lower_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        with without_autocast():
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _make_single_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return op(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))

    return kernel


def _make_single_result_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            if _is_eligible(args[0]) and kwargs.get("dtype") is None and args[0].dtype is not torch.float32:
                kwargs = {**kwargs, "dtype": torch.float32}
                n_positional = len(op._schema.arguments) - sum(a.kwarg_only for a in op._schema.arguments)
                if any(a.name == "dtype" and not a.kwarg_only for a in op._schema.arguments):
                    args = args[: n_positional - 1]
            return op(*args, **kwargs)

    return kernel


def _make_widest_kernel(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        lower = torch.get_autocast_dtype(NAME)
        single = any(t.dtype is torch.float32 for t in _find_eligible(args))
        with without_autocast():
            dtype = torch.float32 if single else lower
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


def _find_eligible(value: Any) -> Iterator[Tensor]:
    if _is_eligible(value):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _find_eligible(item)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        value = to_gpu(value) if value.is_floating_point() else value
        return _cast_once(value, dtype) if _is_eligible(value) and value.dtype is not dtype else value
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    return type(value)(_cast(item, dtype) for item in value) if type(value) in (tuple, list) else value


def _cast_once(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cached = (
        torch.is_autocast_cache_enabled()
        and dtype is torch.get_autocast_dtype(NAME)
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not torch.is_inference_mode_enabled()
    )
    if not cached:
        return tensor.to(dtype)
    cast: Tensor | None = _casts.get(tensor)  # type: ignore[no-untyped-call]
    if cast is None:
        cast = _casts[tensor] = tensor.to(dtype)
    return cast


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == NAME
    )
