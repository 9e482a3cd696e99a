"""Dropout: one kernel that saves which elements stay."""

from __future__ import annotations

from lowtide.foresight.behaviours.behaviour import Behaviour

ROWS = (
    Behaviour(
        name="dropout",
        does="saves a byte for each element; on the CPU it saves a mask of numbers",
        source="aten/src/ATen/native/Dropout.cpp: is_fused_kernel_acceptable, torch 2.13",
    ),
)
