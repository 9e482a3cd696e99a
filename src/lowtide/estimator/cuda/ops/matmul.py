"""Matrix products: cuBLAS allocates a workspace for each thread at its first product, and never frees it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.fake_modes import is_strided
from lowtide.estimator.cpu.scratch import blas_reads
from lowtide.estimator.cuda.current_gpu import CAPABILITY_ASSUMED
from lowtide.estimator.cuda.ops.op_registry import Behaviour, ScratchBlock, cuda_op
from lowtide.memory.gpu_specs import GpuSpec, compute_cublas_workspace

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

Behaviour(
    name="cuBLAS workspace",
    does="8.1 MiB for each thread that multiplies (two: forward and backward), 32 MiB on 9.x, 10.x and 12.x",
    source="aten/src/ATen/cuda/CublasHandlePool.cpp: getChosenWorkspaceSize, torch 2.13",
)
Behaviour(
    name="cuBLASLt workspace",
    does="shares the workspace of cuBLAS; before torch 2.13, takes 1 MiB more for each thread, at its first product "
    "with a bias",
    source="torch/backends/cuda/__init__.py: cublaslt_workspace_size, torch 2.13; measured on an H200, torch 2.11",
)
_FACTORS = Behaviour(
    name="factors",
    does="copies matrices in which neither rows nor columns are contiguous",
    source="torch/include/ATen/native/cuda/cuBlasCommonArgs.h: prepare_matrix_for_cublas, torch 2.13; "
    "aten/src/ATen/native/cuda/Blas.cpp: prepare_batch_matrix_for_cublas, torch of 2022 and later",
)

PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default}
)

WORKSPACE = "cublas::workspace"
"""Operator that cuBLAS's workspaces are attributed to."""

LT_WORKSPACE = "cublaslt::workspace"
"""Operator that cuBLASLt's workspaces are attributed to."""


@cuda_op(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, of=_FACTORS)
def _list_factor_copies(args: Any, kwargs: Any, results: list[Tensor]) -> list[ScratchBlock]:
    """Return the blocks for copies of the factors (the last two tensor arguments) that cuBLAS can't read directly."""
    factors = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    return [
        ScratchBlock.exactly(t.numel() * t.element_size()) for t in factors if is_strided(t) and not _is_readable(t)
    ]


def _is_readable(factor: Tensor) -> bool:
    """Return True if cuBLAS can read a factor without a copy, as it is or transposed."""
    if factor.dim() == 2 and (factor.is_contiguous() or factor.t().is_contiguous()):
        return True
    return blas_reads(factor) or (factor.is_contiguous() and 0 not in factor.stride()[-2:])


def count_workspace_bytes(gpu: GpuSpec) -> int:
    """Return the bytes of the cuBLAS workspace that each thread's first matrix product allocates."""
    known = gpu.compute_cublas_workspace()
    return compute_cublas_workspace(CAPABILITY_ASSUMED) if known is None else known


_IS_SHARED = hasattr(torch.backends.cuda, "cublaslt_workspace_size")
"""True since torch 2.13, which introduced the shared workspace."""


def count_lt_workspace_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of the cuBLASLt workspace that each thread's first matrix product with a bias allocates.

    Return 0 if cuBLASLt shares cuBLAS's workspace.
    """
    shared = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1" if _IS_SHARED else "0")
    return 0 if shared == "1" else int(environment.get("CUBLASLT_WORKSPACE_SIZE", "1024")) * 1024


def is_with_bias(func: Any, args: Any) -> bool:
    """Return True if cuBLASLt runs the operator: `addmm` with one bias number for each column.

    Torch's own check is isInputCompliesAddmmCudaLt.
    """
    if func is not aten.addmm.default:
        return False
    bias, _, other = args[:3]
    rows, columns = other.shape
    return bool(bias.dim() == 1 and bias.is_contiguous() and bias.shape[0] == columns > 1 and rows > 1)
