"""Matrix products: cuBLAS has a workspace for each thread, taken at its first product and never given back."""

from __future__ import annotations

import torch

from lowtide.foresight.behaviours.behaviour import Behaviour
from lowtide.foresight.device.current import CAPABILITY_ASSUMED
from lowtide.memory.cards import Card, cublas_workspace_bytes

aten = torch.ops.aten

ROWS = (
    Behaviour(
        name="cuBLAS workspace",
        does="8.1 MiB for each thread that multiplies (forward and backward: two), 32 MiB on 9.x, 10.x and 12.x",
        source="aten/src/ATen/cuda/CublasHandlePool.cpp: getChosenWorkspaceSize, torch 2.13",
    ),
    Behaviour(
        name="cuBLASLt workspace",
        does="that of cuBLAS is used",
        source="torch/backends/cuda/__init__.py: cublaslt_workspace_size, torch 2.13",
    ),
)

PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default}
)

WORKSPACE = "cublas::workspace"
"""The operator that those blocks are put down to."""


def workspace_bytes(card: Card) -> int:
    """What each thread's first product takes."""
    known = card.cublas_workspace_bytes()
    return cublas_workspace_bytes(CAPABILITY_ASSUMED) if known is None else known
