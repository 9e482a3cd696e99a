"""Budgets relative to the GPU in use: "auto", and "90% of gpu"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from lowtide.errors import BudgetError
from lowtide.units import format_bytes
from lowtide.utils.amounts import AUTO, share_of_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

MARGIN: Final = 0.08
"""Share of the free memory that "auto" leaves to the allocator: a budget bounds the requested bytes, and the allocator
reserves more because of fragmentation."""


def on_device(budget: int | str, device: torch.device, say: Callable[[str], object]) -> int | str:
    """Return `budget` in bytes if it refers to the GPU, and unchanged otherwise.

    "auto" is the memory free on `device` plus the memory that this process's allocator holds there, less MARGIN; `say`
    reports both. Raises BudgetError if `device` is not a GPU.
    """
    if not isinstance(budget, str) or (budget.strip().lower() != AUTO and share_of_gpu(budget) is None):
        return budget
    if device.type != "cuda":
        raise BudgetError(
            f'{budget!r} is a budget of a GPU, and the model is on {device}.\n  Nearest: an amount, as in "8GiB", or a '
            'share of the plain step\'s peak, as in "60%".'
        )
    free, total = torch.cuda.mem_get_info(device)
    if (share := share_of_gpu(budget)) is not None:
        return int(total * share)
    budget_bytes, text = automatic_budget(free, total, torch.cuda.memory_reserved(device))
    say(text)
    return budget_bytes


def automatic_budget(free_bytes: int, total_bytes: int, reserved_bytes: int) -> tuple[int, str]:
    """Return the budget that "auto" stands for, and its derivation in words."""
    ours = free_bytes + reserved_bytes
    margin = int(ours * MARGIN)
    others = total_bytes - ours
    return ours - margin, (
        f"budget auto: {format_bytes(ours - margin)} = {format_bytes(total_bytes)} of the GPU, less "
        f"{format_bytes(others)} in CUDA contexts and other processes, less {format_bytes(margin)} for the allocator's "
        "pieces"
    )
