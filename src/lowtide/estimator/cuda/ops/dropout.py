"""Dropout: one kernel that saves a mask of the kept elements."""

from __future__ import annotations

import torch

from lowtide.estimator.cuda.ops.op_registry import Behaviour, ensure_entry

Behaviour(
    name="dropout",
    does="saves one byte per element, where the CPU saves a mask of numbers",
    source="aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable, torch 2.13",
)
_ORDER = Behaviour(
    name="dropout, order",
    does="allocates the mask before the result",
    source="aten/src/ATen/native/cuda/Dropout.cu: dropout_cuda, torch 2.6 and later",
)

ensure_entry(torch.ops.aten.native_dropout.default, of=_ORDER).order = (1, 0)
