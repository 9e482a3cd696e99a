"""Layer norm in one Triton kernel: the bits of torch's kernel, on the GPUs and types where the audit would take it."""

import importlib.util

import pytest
import torch

from lowtide.runtime.recipes import IMPLEMENTATIONS

HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_the_recipe_is_tried_on_cuda_only() -> None:
    (recipe,) = IMPLEMENTATIONS["NativeLayerNormBackward0"].values()
    assert recipe.device == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which is not installed")
@pytest.mark.parametrize("width", [64, 768, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_its_output_has_the_bits_of_torchs_kernel(width: int, dtype: torch.dtype, affine: bool) -> None:
    from lowtide.runtime.kernels.layer_norm import layer_norm_from_statistics

    x = (torch.randn(37, width, device="cuda") * 3 + 1).to(dtype)
    weight, bias = torch.randn(2, width, device="cuda").to(dtype) if affine else (None, None)
    expected, mean, rstd = torch.ops.aten.native_layer_norm(x, [width], weight, bias, 1e-5)
    assert torch.equal(layer_norm_from_statistics(x, weight, bias, mean.flatten(), rstd.flatten(), width), expected)
