"""Fast Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe("FftR2CBackward0", edges={"self": 0})
def fft_r2c(self: Tensor, *, dim: tuple[int, ...], normalization: int, onesided: bool) -> Tensor:
    return aten._fft_r2c(self, dim, normalization, onesided)


@recipe("FftC2RBackward0", edges={"self": 0})
def fft_c2r(self: Tensor, *, dim: tuple[int, ...], normalization: int, out_shape: torch.Size) -> Tensor:
    return aten._fft_c2r(self, dim, normalization, out_shape[dim[-1]])


@recipe("FftC2CBackward0", edges={"self": 0})
def fft_c2c(self: Tensor, *, dim: tuple[int, ...], normalization: int, forward: bool) -> Tensor:
    return aten._fft_c2c(self, dim, normalization, forward)
