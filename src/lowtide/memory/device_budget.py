"""Budgets that need a GPU: "auto", "90% of gpu", and budgets for the bytes that the GPU's allocator reserves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

import torch

from lowtide.errors import BudgetError, LowtideError
from lowtide.units import format_bytes
from lowtide.utils.amounts import BudgetFor, check_budget, is_of_gpu, parse_gpu_share

if TYPE_CHECKING:
    from collections.abc import Callable

MARGIN: Final = 0.08
"""Share of the free memory that "auto" leaves to the allocator: a budget bounds the requested bytes, and the allocator
reserves more because of fragmentation."""


def check_on_device(budget: int | str, device: torch.device | None, budget_for: BudgetFor = "requested") -> None:
    """Raise BudgetError for an invalid budget, and for a GPU budget if `device` is not a GPU.

    Args:
        budget: The budget that was asked for.
        device: The model's device. None if the model is not known yet: then any GPU in the machine will do.
        budget_for: The bytes that the budget bounds.

    Raises:
        BudgetError: If this is not a budget for the device; the error names the nearest valid budget.
    """
    if budget_for not in get_args(BudgetFor):
        raise LowtideError(f'budget_for is {budget_for!r}; it takes "requested" or "reserved".')
    check_budget(budget, of_gpu=True)
    if not is_of_gpu(budget) and budget_for == "requested":
        return
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return
    reason = "torch finds no GPU here" if device is None else f"the model is on {device}"
    if is_of_gpu(budget):
        raise BudgetError(
            f'{budget!r} is a budget of a GPU, and {reason}.\n  Nearest: an amount, as in "8GiB", or a share of the '
            'plain step\'s peak, as in "60%".'
        )
    raise BudgetError(
        f'budget_for="reserved" bounds what the allocator of a GPU reserves, and {reason}: there each tensor takes the '
        'bytes that it requests.\n  Nearest: budget_for="requested", the default.'
    )


def on_device(budget: int | str, device: torch.device, say: Callable[[str], object]) -> int | str:
    """Return `budget` in bytes if it refers to the GPU, and unchanged otherwise.

    "auto" is the memory free on `device` plus the memory that this process's allocator holds there, less MARGIN; `say`
    reports both. Raises BudgetError if `device` is not a GPU.
    """
    check_on_device(budget, device)
    if not isinstance(budget, str) or not is_of_gpu(budget):
        return budget
    free, total = torch.cuda.mem_get_info(device)
    if (share := parse_gpu_share(budget)) is not None:
        return int(total * share)
    budget_bytes, text = compute_automatic_budget(free, total, torch.cuda.memory_reserved(device))
    say(text)
    return budget_bytes


def compute_automatic_budget(free_bytes: int, total_bytes: int, reserved_bytes: int) -> tuple[int, str]:
    """Return the budget in bytes that "auto" means on such a GPU, and a text that explains how it was computed."""
    ours = free_bytes + reserved_bytes
    margin = int(ours * MARGIN)
    others = total_bytes - ours
    return ours - margin, (
        f"budget auto: {format_bytes(ours - margin)} = {format_bytes(total_bytes)} of the GPU, less "
        f"{format_bytes(others)} in CUDA contexts and other processes, less {format_bytes(margin)} for fragmentation"
    )
