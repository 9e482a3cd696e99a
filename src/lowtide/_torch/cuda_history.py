"""Private names of torch: the history of the CUDA caching allocator."""

from __future__ import annotations

from typing import Any

import torch


def history_is_on() -> bool:
    """Return True if the allocator's history is being recorded. Relies on internals of torch 2.13."""
    return bool(torch._C._cuda_isHistoryEnabled())


def start_history() -> None:
    """Record every action of the CUDA allocator, with the Python frames of allocations. Relies on internals of torch
    2.13, present since 2.1.
    """
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", clear_history=True)


def stop_history() -> None:
    """Stop recording and drop the recorded history. Relies on internals of torch 2.13, present since 2.1."""
    torch.cuda.memory._record_memory_history(None)


def snapshot() -> dict[str, Any]:
    """Return the allocator's state; "device_traces" has one list of recorded actions per device. Relies on internals of
    torch 2.13, present since 2.1.
    """
    return dict(torch.cuda.memory._snapshot())


def requested_bytes(index: int) -> dict[int, int]:
    """Return the bytes requested for each allocated block of a device, by address. Relies on internals of torch 2.13,
    present since 2.1.
    """
    segments = (segment for segment in snapshot()["segments"] if segment["device"] == index)
    blocks = (block for segment in segments for block in segment["blocks"])
    return {block["address"]: block["requested_size"] for block in blocks if block["state"] == "active_allocated"}


def drop_workspaces() -> None:
    """Free cuBLAS workspaces; the next matrix products allocate them again. Relies on internals of torch 2.13, present
    since 1.11.
    """
    torch._C._cuda_clearCublasWorkspaces()


def set_metadata(text: str) -> None:
    """Attach `text` to all further actions that the CUDA allocator records in this thread. Relies on internals of torch
    2.13, present since 2.10.
    """
    torch.cuda.memory._set_memory_metadata(text)
