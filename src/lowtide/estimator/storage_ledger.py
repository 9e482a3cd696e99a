"""The ledger of an estimated step: the allocation and the free of each storage, as a stream of events.

torch keeps the Python object of a storage as long as the storage itself lives, so a weak reference to the object dies
exactly when the last holder, such as autograd, frees the memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lowtide._torch.fake_modes import is_strided
from lowtide._torch.tensors import find_parts, get_storage_id, get_storage_number
from lowtide.errors import RehearsalError
from lowtide.memory.events import Allocate, Event, EventStream, Free, Label, Mark, Recorder

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor

    from lowtide.memory.events import Category


class _Living:
    """A live storage: its memory block, and the weak reference whose callback records that the storage was freed."""

    __slots__ = ("block", "bytes", "end")

    def __init__(self, block: int, n_bytes: int) -> None:
        self.block = block
        self.bytes = n_bytes
        self.end: weakref.ref[torch.UntypedStorage] | None = None


class StorageLedger(Recorder):
    """Recorder of the allocations and frees of storages on one device during the steps of an estimate."""

    def __init__(self, device: str, stream_number: Callable[[], int]) -> None:
        """Create an empty ledger for `device`. `stream_number` returns the current stream, 0 for the default one."""
        self.device = device
        self._stream_number = stream_number
        self._living: dict[int, _Living] = {}
        self._entered: list[Event] = []
        self._earlier: list[Event] = []
        self._events: list[Event] = []
        self.n_blocks = 0
        """Number of blocks allocated so far, which is also the number of the next block."""
        self._given: tuple[int, int, int] | None = None
        """Memory that may have been reused: number of the old storage, number of the new one, index in the events."""
        self._n_sharing: Counter[int] = Counter()
        """Number of other storages that share a block's memory, by block."""
        self.streams: dict[int, int] = {}
        """Block -> number of the stream on which it was allocated, if that is not the default stream."""
        self.categories: dict[int, Category] = {}
        """Categories of blocks whose purpose is known when they are allocated, by block."""
        self._purposes: list[Category] = []
        """Stack of purposes of the memory that is allocated now."""
        self.lengths: tuple[int, int] | None = None
        """Lengths (old, new): a tensor whose first dimension has the old length counts as if it had the new length."""
        self._n_in_step: int | None = None
        """Number of events until the end of the step, if it was recorded."""
        self._n_corrected = 0
        """Number of corrections to recorded events."""
        self._recording = False

    # --- the recorder

    def __enter__(self) -> Self:
        self._recording = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.settle()
        self._recording = False

    def mark(self, label: str, data: object = None) -> None:
        if self._recording:
            self._events.append(Mark(label, data))

    @property
    def stream(self) -> EventStream:
        """Stream of the events recorded since the last `begin`."""
        if self._recording:
            raise RehearsalError("the stream of a recorder is complete only when its with block has ended.")
        return self.so_far

    @property
    def so_far(self) -> EventStream:
        """Stream of the events since the last `begin`, available while the recording continues."""
        return EventStream(tuple(self._events), self.device, self.streams)

    @property
    def whole(self) -> EventStream:
        """Stream of all recorded events, beginning with allocations of the storages that existed before the step."""
        return EventStream((*self._entered, *self._earlier, *self.stream), self.device, self.streams)

    @property
    def version(self) -> object:
        """Version number that changes when events that `since` has returned earlier are changed."""
        return len(self._entered), self._n_corrected

    def since(self, position: int) -> Iterator[Event]:
        """Yield the events of the whole recording from `position` on."""
        for part in (self._entered, self._earlier, self._events):
            yield from part[position:]
            position = max(position - len(part), 0)

    def begin(self) -> None:
        """Begin a new stream of events. Storages that are alive now count as existing at its beginning."""
        self.settle()
        self._earlier += self._events
        self._events.clear()
        self._n_in_step = None

    def end_step(self) -> None:
        """Record that the step is over, so that `forget_later` can forget all later events."""
        self.settle()
        self._n_in_step = len(self._events)

    def forget_later(self) -> None:
        """Forget the events after the end of the step, if it was recorded."""
        if self._n_in_step is not None:
            self.settle()
            del self._events[self._n_in_step :]

    # --- what is known of blocks

    @property
    def labels(self) -> dict[int, Label]:
        """Labels of blocks whose category is known when they are allocated."""
        return {block: Label(category) for block, category in self.categories.items()}

    def addresses(self) -> dict[int, int]:
        """Map the number of each live block to the number of its storage."""
        return {living.block: number for number, living in self._living.items() if living.bytes}

    def block(self, storage: int) -> int | None:
        """Return the block of the storage with this number; None if it has no block."""
        living = self._living.get(storage)
        return None if living is None else living.block

    def knows(self, tensor: Tensor) -> bool:
        """Return True if the storage of a tensor is tracked."""
        return get_storage_id(tensor) in self._living

    def is_newer(self, tensor: Tensor, block: int, n_bytes: int) -> bool:
        """Return True if a tensor's memory has `n_bytes`, and was allocated as block number `block` or later."""
        living = self._living.get(get_storage_id(tensor))
        return living is not None and living.block >= block and living.bytes == n_bytes

    @contextlib.contextmanager
    def purpose(self, category: Category) -> Iterator[None]:
        """Set the category of all memory that is allocated inside this `with` block."""
        self._purposes.append(category)
        try:
            yield
        finally:
            self._purposes.pop()

    def becomes(self, tensor: Tensor, category: Category) -> None:
        """Set the category of a tensor's memory."""
        for part in find_parts(tensor):
            if (living := self._living.get(get_storage_id(part))) is not None:
                self.categories[living.block] = category

    # --- storages

    def follow(self, tensor: Tensor, op: str = "", *, entry: bool = False, n_bytes: int | None = None) -> None:
        """Track a tensor's storage from now until it is freed.

        A storage that is tracked already, or on another device, is ignored. With `entry`, the storage exists before the
        step. The recorded allocation has `n_bytes` bytes, by default the storage's size; none is recorded for 0.
        """
        if tensor.device.type != self.device or not is_strided(tensor):
            return
        storage = tensor.untyped_storage()
        key = get_storage_number(storage)
        if key in self._living:
            return
        size = storage.nbytes() if n_bytes is None else n_bytes
        if self.lengths is not None and n_bytes is None and tensor.dim() and tensor.shape[0] == self.lengths[0]:
            size = size * self.lengths[1] // self.lengths[0]
        if not (size or storage.nbytes()):
            return
        if not size:
            self._track(storage, key, _Living(0, 0))
        elif entry:
            living = _Living(-1 - len(self._entered), size)
            self._entered.append(Allocate(living.block, size, key, op))
            self._track(storage, key, living)
        else:
            self._track(storage, key, _Living(self.allocate(size, op, key), size))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized: its old memory is freed, and new memory is allocated.

        No operator reports a resize.
        """
        key = get_storage_number(storage)
        if (living := self._living.get(key)) is not None:
            self.ended(key, living)
        if n_bytes := storage.nbytes():
            self._track(storage, key, _Living(self.allocate(n_bytes, "resize_", key), n_bytes))

    def allocate(self, n_bytes: int, op: str, storage: int = 0) -> int:
        """Record the allocation of a block for a storage, by the storage's number or 0. Return the block's number."""
        block = self._number_block()
        self._events.append(Allocate(block, n_bytes, storage, op))
        return block

    def free(self, block: int, n_bytes: int) -> None:
        """Record that a block without a storage is freed."""
        self._events.append(Free(block, n_bytes))

    def inside(self, sizes: Sequence[int], op: str) -> range:
        """Record blocks of the given sizes that an operator allocates and frees internally. Return their numbers."""
        first = self.n_blocks
        self._events += [Allocate(self._number_block(), size, 0, op) for size in sizes]
        blocks = range(first, self.n_blocks)
        self._events += [Free(*block) for block in zip(reversed(blocks), reversed(sizes), strict=True)]
        return blocks

    def reuse_memory(self, old: Tensor, new: Tensor) -> bool:
        """Record that `new` reuses the memory of `old` if both have the same size. Return True if so.

        If `old` is still alive when the next operator runs, `settle` reverts the reuse.
        """
        key = get_storage_id(old)
        living = self._living.get(key)
        if living is None or old.dtype != new.dtype or living.bytes != new.untyped_storage().nbytes():
            return False
        self._given = key, self._assign_block(living.block, new.untyped_storage()), len(self._events)
        return True

    def share(self, tensor: Tensor, new: Tensor) -> None:
        """Record that `new` uses the memory of `tensor`. The memory is freed when both storages are freed."""
        block = self._living[get_storage_id(tensor)].block
        self._n_sharing[block] += 1
        self._assign_block(block, new.untyped_storage())

    def settle(self) -> None:
        """Revert the last `reuse_memory` if its old storage is still alive: record a block for the new storage."""
        if self._given is None:
            return
        _, new, index = self._given
        self._given = None
        heir = self._living.get(new)
        if heir is not None:
            heir.block = self._number_block()
            self._events.insert(index, Allocate(heir.block, heir.bytes, new, "aten::add"))
            self._n_corrected += 1

    @contextlib.contextmanager
    def corrected(self) -> Iterator[None]:
        """Rewrite the recording if code in this `with` block replaces one block of memory by another.

        If exactly one block is freed there and exactly one is allocated, earlier events are changed as if the new block
        had been allocated instead of the freed one. Otherwise nothing is changed.
        """
        n_before = len(self._events)
        yield
        allocations = {event.block: event for event in self._events[n_before:] if isinstance(event, Allocate)}
        ended = [event.block for event in self._events[n_before:] if isinstance(event, Free)]
        created = [allocations[block] for block in allocations if block not in ended]
        freed = [block for block in ended if block not in allocations]
        if len(created) == len(freed) == 1:
            for place, event in enumerate(self._events[:n_before]):
                if isinstance(event, Allocate) and event.block == freed[0]:
                    self._events[place : place + 1] = created
                    del self._events[n_before:]
                    self._n_corrected += 1
                    return

    def ended(self, key: int, living: _Living) -> None:
        """Record that a storage's block is freed, unless another storage uses the same memory.

        Do nothing if the number `key` belongs to a newer storage by now.
        """
        if self._living.get(key) is not living:
            return
        del self._living[key]
        if self._given is not None and self._given[0] == key:
            self._given = None  # its memory was reused: the block becomes the new storage's
            return
        if self._n_sharing[living.block] > 0:
            self._n_sharing[living.block] -= 1
        elif self._recording and living.bytes:
            self._events.append(Free(living.block, living.bytes))

    def _assign_block(self, block: int, storage: torch.UntypedStorage) -> int:
        """Assign the memory of a block to a new storage. Return the storage's number."""
        number = get_storage_number(storage)
        self._track(storage, number, _Living(block, storage.nbytes()))
        return number

    def _track(self, storage: torch.UntypedStorage, key: int, living: _Living) -> None:
        living.end = weakref.ref(storage, _EndCallback(self, key, living))
        self._living[key] = living

    def _number_block(self) -> int:
        """Return the number of a new block, and record the block's purpose and stream."""
        block = self.n_blocks
        self.n_blocks += 1
        if self._purposes:
            self.categories[block] = self._purposes[-1]
        if stream := self._stream_number():
            self.streams[block] = stream
        return block


class _EndCallback:
    """Callback of a weak reference to a storage. It records that the storage was freed."""

    __slots__ = ("key", "ledger", "living")

    def __init__(self, ledger: StorageLedger, key: int, living: _Living) -> None:
        self.ledger, self.key, self.living = ledger, key, living

    def __call__(self, _: object) -> None:
        self.ledger.ended(self.key, self.living)
