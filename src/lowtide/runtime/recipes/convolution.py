"""Convolutions in one to three dimensions, transposed ones too."""

from __future__ import annotations

from torch import Tensor

from lowtide.runtime.recipes.registry import aten, recipe


@recipe(
    "ConvolutionBackward0",
    edges={"input": 0, "weight": 1, "bias": 2},
    owner="weight",
    together={"bias": "bias_sym_sizes_opt"},
    expensive=True,
)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
) -> Tensor:
    return aten.convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
