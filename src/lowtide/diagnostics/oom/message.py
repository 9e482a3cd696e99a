"""Record of an out-of-memory message and its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planner.serialization import Record

USUAL_CONTEXT_BYTES = 1 << 30
"""Memory that the context and libraries of a process are assumed to take on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(Record):
    """A named holder of memory: a process, or a part of the training step."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Record):
    """One out-of-memory message. Amounts are None if the message does not state them, and rounded as it states them.

    On the device: `total = free + process + others + unnamed`; in this process
    `process = allocated + unallocated + outside PyTorch`.
    """

    process: str | None = None
    """Process that wrote the message, if the log's lines begin with it: `rank 0`, `pid 3959`."""
    kind: str
    """The memory that ran out: `cuda`, `hip`, `xpu`, `npu`, `mps`, `cpu`, or a library: `cublas`, `cudnn`, `nccl`."""
    form: str
    """Versions that print this wording, or the program: `torch 1.4 to 2.0`, `vLLM`."""
    text: str
    """The message itself, on one line."""
    certain: bool = True
    """False for messages that often, but not always, mean that memory ran out."""
    device: int | None = None
    shape: tuple[int, ...] | None = None
    """Shape of the array that failed, if the message states it."""
    tried_bytes: int | None = None
    """Bytes of the failed request, which may be only the last of many."""
    total_bytes: int | None = None
    """Capacity of the device."""
    free_bytes: int | None = None
    """Memory free for all processes on the device, after the allocator has returned its cache."""
    allocated_bytes: int | None = None
    """Memory in use by tensors of this process."""
    unallocated_bytes: int | None = None
    """Memory that PyTorch has reserved but does not use: gaps between tensors."""
    private_pool_bytes: int | None = None
    """The part of `allocated_bytes` in private pools, mostly of CUDA graphs."""
    process_bytes: int | None = None
    """Memory of this process on the device: PyTorch's, the context, libraries."""
    others: tuple[Holder, ...] = ()
    """Other processes on the device."""
    maybe_own: tuple[str, ...] = ()
    """Listed processes that may be the one that printed the message. If `process_bytes` is set as well, it belongs to
    the most likely of them.
    """
    allowed_bytes: int | None = None
    """A limit below the capacity: `set_per_process_memory_fraction`, MPS's watermark."""
    elsewhere_bytes: int | None = None
    """MPS: memory of this process outside PyTorch."""
    setting: str | None = None
    """Environment variable of the allocator's settings, if the message names it: `PYTORCH_ALLOC_CONF`."""

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that PyTorch has reserved on the device in this process; None if the message does not state them."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def others_bytes(self) -> int:
        """Bytes of all other processes that the message names."""
        return sum(other.bytes for other in self.others)

    @property
    def sure_others_bytes(self) -> int:
        """Bytes that other processes hold at least: without the largest listed process that may be this one."""
        own = [other.bytes for other in self.others if other.name in self.maybe_own]
        return self.others_bytes - (max(own, default=0) if self.process_bytes is None else 0)

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of this process outside PyTorch's allocator; None if the message does not state them."""
        if self.elsewhere_bytes is not None:
            return self.elsewhere_bytes
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)

    @property
    def known_own_bytes(self) -> int | None:
        """Bytes of this process: its total if stated, else the reserved bytes, else (`async`) the allocated bytes."""
        stated = self.reserved_bytes if self.process_bytes is None else self.process_bytes
        return self.allocated_bytes if stated is None and self.form == "async" else stated

    @property
    def unnamed_bytes(self) -> int | None:
        """Bytes that are neither free nor held by a process that the message names; None if not stated."""
        own = self.known_own_bytes
        if self.total_bytes is None or self.free_bytes is None or own is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - own - self.others_bytes)

    @property
    def hidden_bytes(self) -> int | None:
        """Bytes on the device that are held by processes missing in the message's list; None if not stated.

        If the message does not state this process's total, the size of a usual CUDA context is subtracted.
        """
        unnamed = self.unnamed_bytes
        if unnamed is None or self.process_bytes is not None:
            return unnamed
        return max(0, unnamed - USUAL_CONTEXT_BYTES)

    @property
    def held_bytes(self) -> int | None:
        """Bytes of this process: reserved or else allocated, plus other allocations of MPS. None if not stated."""
        held = self.allocated_bytes if self.reserved_bytes is None else self.reserved_bytes
        return None if held is None else held + (self.elsewhere_bytes or 0)

    @property
    def usable_bytes(self) -> int | None:
        """Largest number of bytes that PyTorch could use: its own and the free bytes, within all limits.

        None if the message does not state them.
        """
        if self.reserved_bytes is None or self.free_bytes is None:
            return None if self.allowed_bytes is None else self.allowed_bytes - (self.elsewhere_bytes or 0)
        limits = (self.reserved_bytes + self.free_bytes, self.allowed_bytes, self.total_bytes)
        return min(limit for limit in limits if limit is not None)
