"""Layer norm in one Triton kernel: the bits of torch's kernel, on the GPUs and types where the audit would take it."""

import importlib.util
import os

import pytest
import torch

from lowtide.runtime.recipes import IMPLEMENTATIONS

HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_the_recipe_is_tried_on_cuda_only() -> None:
    (recipe,) = IMPLEMENTATIONS["NativeLayerNormBackward0"].values()
    assert recipe.device == "cuda"


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is told to interpret kernels")
@pytest.mark.parametrize("affine", [True, False])
def test_it_compiles_for_a_gpu_that_is_not_here(affine: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lowtide.runtime.kernels import layer_norm

    constants = {"has_weight": affine, "has_bias": affine, "block": 1024}
    types = {"input": "*bf16", "mean": "*fp32", "rstd": "*fp32", "weight": "*bf16", "bias": "*bf16", "out": "*bf16"}
    types |= {"width": "i32", **dict.fromkeys(constants, "constexpr")}
    kernel = triton.compile(ASTSource(layer_norm._rows, types, constants), target=GPUTarget("cuda", 90, 32))
    assert "st.global" in kernel.asm["ptx"]


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
