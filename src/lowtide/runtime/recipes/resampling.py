"""Images and signals resampled or rearranged: interpolation, pixel shuffles, patches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import Function, aten, recipe


@recipe("UpsampleNearest1DBackward0", edges={"self": 0})
def upsample_nearest1d(self: Tensor, *, output_size: tuple[int, ...], scales: float | None) -> Tensor:
    return aten.upsample_nearest1d(self, output_size, scales)


@recipe("UpsampleNearestExact1DBackward0", edges={"self": 0})
def upsample_nearest_exact1d(self: Tensor, *, output_size: tuple[int, ...], scales: float | None) -> Tensor:
    return aten._upsample_nearest_exact1d(self, output_size, scales)


@recipe("UpsampleLinear1DBackward0", edges={"self": 0})
def upsample_linear1d(
    self: Tensor, *, output_size: tuple[int, ...], align_corners: bool, scales: float | None
) -> Tensor:
    return aten.upsample_linear1d(self, output_size, align_corners, scales)


def nearest2d(op: Callable[..., Tensor]) -> Function:
    def function(
        self: Tensor, *, output_size: tuple[int, ...], scales_h: float | None, scales_w: float | None
    ) -> Tensor:
        return op(self, output_size, scales_h, scales_w)

    function.__name__ = op.__name__
    return function


def linear2d(op: Callable[..., Tensor]) -> Function:
    def function(
        self: Tensor,
        *,
        output_size: tuple[int, ...],
        align_corners: bool,
        scales_h: float | None,
        scales_w: float | None,
    ) -> Tensor:
        return op(self, output_size, align_corners, scales_h, scales_w)

    function.__name__ = op.__name__
    return function


recipe("UpsampleNearest2DBackward0", edges={"self": 0})(nearest2d(aten.upsample_nearest2d))
recipe("UpsampleNearestExact2DBackward0", edges={"self": 0})(nearest2d(aten._upsample_nearest_exact2d))
recipe("UpsampleBilinear2DBackward0", edges={"self": 0})(linear2d(aten.upsample_bilinear2d))
recipe("UpsampleBilinear2DAaBackward0", edges={"self": 0})(linear2d(aten._upsample_bilinear2d_aa))
recipe("UpsampleBicubic2DBackward0", edges={"self": 0})(linear2d(aten.upsample_bicubic2d))
recipe("UpsampleBicubic2DAaBackward0", edges={"self": 0})(linear2d(aten._upsample_bicubic2d_aa))


@recipe("UpsampleNearest3DBackward0", edges={"self": 0})
def upsample_nearest3d(
    self: Tensor,
    *,
    output_size: tuple[int, ...],
    scales_d: float | None,
    scales_h: float | None,
    scales_w: float | None,
) -> Tensor:
    return aten.upsample_nearest3d(self, output_size, scales_d, scales_h, scales_w)


@recipe("UpsampleTrilinear3DBackward0", edges={"self": 0})
def upsample_trilinear3d(
    self: Tensor,
    *,
    output_size: tuple[int, ...],
    align_corners: bool,
    scales_d: float | None,
    scales_h: float | None,
    scales_w: float | None,
) -> Tensor:
    return aten.upsample_trilinear3d(self, output_size, align_corners, scales_d, scales_h, scales_w)


@recipe("GridSampler2DBackward0", edges={"input": 0, "grid": 1})
def grid_sampler_2d(
    input: Tensor, grid: Tensor, *, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    return aten.grid_sampler_2d(input, grid, interpolation_mode, padding_mode, align_corners)


@recipe("GridSampler3DBackward0", edges={"input": 0, "grid": 1})
def grid_sampler_3d(
    input: Tensor, grid: Tensor, *, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    return aten.grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners)


@recipe("CudnnGridSamplerBackward0", edges={"self": 0, "grid": 1}, device="cuda")
def cudnn_grid_sampler(self: Tensor, grid: Tensor) -> Tensor:
    return aten.cudnn_grid_sampler(self, grid)


@recipe("PixelShuffleBackward0", edges={"self": 0})
def pixel_shuffle(self: Tensor, *, upscale_factor: int) -> Tensor:
    return torch.pixel_shuffle(self, upscale_factor)


@recipe("PixelUnshuffleBackward0", edges={"self": 0})
def pixel_unshuffle(self: Tensor, *, downscale_factor: int) -> Tensor:
    return torch.pixel_unshuffle(self, downscale_factor)


@recipe("ChannelShuffleBackward0", edges={"self": 0})
def channel_shuffle(self: Tensor, *, groups: int) -> Tensor:
    return torch.channel_shuffle(self, groups)


@recipe("Im2ColBackward0", edges={"self": 0})
def im2col(
    self: Tensor,
    *,
    kernel_size: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
) -> Tensor:
    """Recompute `torch.nn.functional.unfold`."""
    return aten.im2col(self, kernel_size, dilation, padding, stride)


@recipe("Col2ImBackward0", edges={"self": 0})
def col2im(
    self: Tensor,
    *,
    kernel_size: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
    out_shape: torch.Size,
) -> Tensor:
    """Recompute `torch.nn.functional.fold`."""
    return aten.col2im(self, out_shape[-2:], kernel_size, dilation, padding, stride)
