"""The record of an out-of-memory error's cause, and checks of messages that several causes share."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.diagnostics.oom.message import Message
from lowtide.planner.serialization import Record
from lowtide.units import format_bytes

_MIB = 1 << 20

SHARE = 0.1
"""Smallest share of the device's capacity that counts as a cause."""
_IMPOSSIBLE_BYTES = 1 << 50
"""Smallest request that must be a wrong size: one PiB."""
_ROWS_OF_A_SET = 1000
"""Smallest numbers of rows and of columns of an array that is assumed to hold the logits of a whole data set."""
HOST = frozenset({"cpu", "numpy", "system", "shared memory"})
"""Kinds of host memory (`Message.kind`)."""
_CACHING = frozenset({"cuda", "hip", "xpu", "npu", "musa", "mlu", "gcu"})
"""Kinds of memory (`Message.kind`) whose allocator requests whole segments from the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Record):
    """Cause of an out-of-memory error."""

    code: str
    """Stable name: `cap`, `huge-tensor`, `other-process`, `not-pytorch`, `private-pools`, `fragmentation`, `driver`,
    `evaluation-with-gradients`, `evaluation-gathers`, `leak`, `optimizer-first-step`, `optimizer-temporaries`,
    `loading`, `model-copy`, `engine-buffers`, `pinned-memory`, `host-memory`, `true-need`.
    """
    claim: str
    evidence: tuple[str, ...]


def compute_needed_bytes(m: Message) -> int:
    """Return the bytes that PyTorch's allocator requests from the driver for the failed allocation: whole segments."""
    tried = m.tried_bytes or 0
    if m.kind not in _CACHING or m.form == "async":
        return tried
    if tried <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if tried < 10 * _MIB else -(-tried // (2 * _MIB)) * 2 * _MIB


def has_room(m: Message) -> bool:
    """Return True if more is free on the device than the request needs."""
    return m.free_bytes is not None and m.tried_bytes is not None and m.free_bytes > compute_needed_bytes(m)


def has_overflowed(m: Message) -> bool:
    """Return True if so much memory was requested that its size must have overflowed."""
    return (m.tried_bytes or 0) >= _IMPOSSIBLE_BYTES


def is_of_windows(m: Message) -> bool:
    """Return True if the message is that of torch's CPU allocator on Windows, where the wording differs."""
    return m.kind == "cpu" and "not enough memory" in m.text


def holds_data_set_logits(m: Message) -> bool:
    """Return True if the array that failed probably holds logits of a whole data set: many rows, and many columns."""
    shape = m.shape or ()
    return len(shape) > 2 and shape[0] >= _ROWS_OF_A_SET and shape[-1] >= _ROWS_OF_A_SET


def holds_data_set_images(m: Message) -> bool:
    """Return True if the array that failed probably holds all images of a data set, judged by its four dimensions."""
    shape = m.shape or ()
    return len(shape) == 4 and shape[0] >= _ROWS_OF_A_SET and any(n in (1, 3, 4) for n in (shape[1], shape[3]))


def describe_held_memory(m: Message) -> str:
    """Describe the memory held by tensors and by PyTorch's cache, for the evidence of a cause."""
    held = f"tensors hold {format_bytes(m.allocated_bytes or 0)}"
    if m.elsewhere_bytes:
        return f"{held}, and {format_bytes(m.elsewhere_bytes)} are outside PyTorch"
    return f"{held} and PyTorch's cache {format_bytes(m.unallocated_bytes)}" if m.unallocated_bytes else held
