"""What an out-of-memory message says, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.planner.serialization import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(Record):
    """Somebody who holds memory: a process, or a part of the training step."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Record):
    """One message. An amount is None where the message does not say it; amounts that are given are exact to its digits.

    On the device: `total = free + process + others + what nobody names`, and in this process
    `process = allocated + unallocated + outside of PyTorch`.
    """

    kind: str
    """Who ran out: `cuda`, `hip`, `xpu`, `npu`, `mps`, `cpu`, or a library: `cublas`, `cudnn`, `nccl`."""
    form: str
    """Which versions print it so: `torch 1.4 to 2.0`."""
    text: str
    """The message itself, on one line."""
    certain: bool = True
    """False for messages that often mean memory and sometimes something else."""
    device: int | None = None
    tried_bytes: int | None = None
    """The request that failed: the last straw, not the size of the problem."""
    total_bytes: int | None = None
    """Capacity of the device."""
    free_bytes: int | None = None
    """Free on the device, for all processes, after the allocator had given back its cache."""
    allocated_bytes: int | None = None
    """In use by tensors of this process."""
    unallocated_bytes: int | None = None
    """Held by PyTorch from the device and not in use: pieces between tensors."""
    private_pool_bytes: int | None = None
    """The part of `allocated_bytes` in pools of their own, mostly of CUDA graphs."""
    process_bytes: int | None = None
    """All that this process has on the device: PyTorch's, the context, libraries."""
    others: tuple[Holder, ...] = ()
    """Other processes on the device."""
    maybe_own: tuple[str, ...] = ()
    """Processes of which one may be this one, where the message leaves that open. If `process_bytes` is given all the
    same, it is that of the one whose size is the usual one."""
    allowed_bytes: int | None = None
    """A limit set below the capacity: `set_per_process_memory_fraction`, MPS's watermark."""
    elsewhere_bytes: int | None = None
    """MPS: what this process has allocated outside of PyTorch."""

    @property
    def reserved_bytes(self) -> int | None:
        """All that PyTorch holds from the device in this process."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def others_bytes(self) -> int:
        """What other processes hold, as far as the message names them."""
        return sum(other.bytes for other in self.others)

    @property
    def sure_others_bytes(self) -> int:
        """What other processes hold at least, whichever of them this one is."""
        mine = [other.bytes for other in self.others if other.name in self.maybe_own]
        return self.others_bytes - (max(mine, default=0) if self.process_bytes is None else 0)

    @property
    def outside_bytes(self) -> int | None:
        """What this process holds outside of PyTorch's allocator."""
        if self.elsewhere_bytes is not None:
            return self.elsewhere_bytes
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)

    @property
    def unnamed_bytes(self) -> int | None:
        """What is neither free nor held by a process that the message names."""
        mine = self.reserved_bytes if self.process_bytes is None else self.process_bytes
        if self.total_bytes is None or self.free_bytes is None or mine is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - mine - self.others_bytes)

    @property
    def usable_bytes(self) -> int | None:
        """What PyTorch could have at most as things stand: its own, and what is free, within the limit."""
        if self.reserved_bytes is None or self.free_bytes is None:
            return self.allowed_bytes
        usable = self.reserved_bytes + self.free_bytes
        return usable if self.allowed_bytes is None else min(usable, self.allowed_bytes)
