"""Observations of one holder of memory over several inspections. The rules of `lowtide.watch` judge them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from lowtide.diagnostics.leaks.reference_path import merged

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.retained_object import RetainedObject

GROWTHS = 3
"""Number of consecutive inspections at which a container must have grown to be reported."""

LEAST_PARTS = 3
"""Smallest number of tuple elements or attributes that count as entries of a container. A pair does not."""

LEAST_GATHERED_BYTES = 2**20
"""Smallest container, in bytes, that is reported although it is emptied now and then, as after each epoch."""

_MOST_EARLIER = 8
"""Number of earlier inspections of a holder that rules can look back on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Observations of one holder of memory, such as a list, over several inspections; the latest one is last."""

    has_changed: bool = False
    """True if the holder has memory now that it did not have at the previous inspection."""
    held_bytes: Sequence[int] = ()
    n_storages: Sequence[int] = ()
    entries: Sequence[int] = ()
    """Entries of the lists, dicts and sets through which the holder reaches the tensors."""
    has_stopped: bool = False
    """True if the containers have stopped growing, or grow much more slowly than before."""
    n_steps: int = 0
    """Number of different steps in which the holder's memory was allocated."""
    n_alike: int = 0
    """Largest number of the holder's graphs that one call site made."""
    largest_graph_bytes: int = 0
    """Bytes of the largest graph of a single forward pass measured so far."""


@dataclass(slots=True)
class Inspections:
    """Record of all inspections of one holder of memory. Each list has one item per recent inspection, in order."""

    n: int = 0
    steps: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    n_storages: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    grown_at: int = 0
    """Step of the last inspection that found more entries than the one before."""
    storages: dict[int, int] = field(default_factory=dict)
    """Bytes by storage, at the last inspection."""
    n_unchanged: int = 0
    """Number of inspections in a row that found the same storages as the one before."""

    def add(
        self, retained: Sequence[RetainedObject], step: int, largest_graph_bytes: int, *, are_copies: bool
    ) -> History:
        """Add an inspection in `step` that found the objects `retained`. Return the history including it.

        `are_copies` is True if the objects are copies of models or optimizers.
        """
        storages, n_entries = collect_storages(retained), count_held_entries(retained)
        is_to_judge = bool(self.entries) and not self.is_refilled(retained)
        has_stopped = is_to_judge and self.has_stopped(n_entries, step, are_copies=are_copies)
        # a new storage may have the address of a freed one: compare sizes, too
        has_changed = self.n > 0 and not storages.items() <= self.storages.items()
        if not self.entries or n_entries > self.entries[-1]:
            self.grown_at = step
        self.n += 1
        self.steps = [*self.steps[-_MOST_EARLIER:], step]
        self.held_bytes = [*self.held_bytes[-_MOST_EARLIER:], sum(storages.values())]
        self.n_storages = [*self.n_storages[-_MOST_EARLIER:], len(storages)]
        self.entries = [*self.entries[-_MOST_EARLIER:], n_entries]
        self.n_unchanged = self.n_unchanged + 1 if storages == self.storages else 0
        self.storages = storages
        n_of_site = Counter(id(item.calls[0].stats) for item in retained if item.has_graph and item.calls)
        return History(
            has_changed=has_changed,
            held_bytes=self.held_bytes,
            n_storages=self.n_storages,
            entries=self.entries,
            has_stopped=has_stopped,
            n_steps=len({step for item in retained for step in item.steps or (item.made_in_step,)}),
            n_alike=max(n_of_site.values(), default=0),
            largest_graph_bytes=largest_graph_bytes,
        )

    def is_refilled(self, retained: Sequence[RetainedObject]) -> bool:
        """Return True if a container of model outputs was emptied and filled again since the last inspection.

        Loops often do so once an epoch: all entries are new, and their number has changed. In a full queue, all entries
        may be new as well, but their number stays the same.
        """
        is_of_outputs = any(item.calls for item in retained)
        is_large = max(*self.held_bytes, sum(collect_storages(retained).values()), 0) >= LEAST_GATHERED_BYTES
        is_new = bool(self.steps) and min(item.made_in_step for item in retained) >= self.steps[-1]
        return is_of_outputs and is_large and is_new and count_held_entries(retained) != self.entries[-1]

    def has_stopped(self, n_entries: int, step: int, *, are_copies: bool) -> bool:
        """Return True if containers that have `n_entries` entries at `step` no longer grow.

        Copies of models and optimizers are often added once an epoch. They count as complete when `step` is more than
        twice the step of their last growth.
        """
        if step == self.steps[-1]:
            return False  # too early to tell: a loader may have added its entry before the step began
        if are_copies:
            return step > 2 * self.grown_at
        return n_entries <= self.entries[-1] or has_slowed([*self.entries, n_entries], [*self.steps, step])


def grows(sizes: Sequence[int], n: int = GROWTHS) -> bool:
    """Return True if each of the last `n` sizes is larger than the one before."""
    last = sizes[-n:]
    return len(last) == n and all(a < b for a, b in pairwise(last))


def has_slowed(entries: Sequence[int], steps: Sequence[int]) -> bool:
    """Return True if the number of entries grew by less than half as much per step as before, as in a full cache.

    Args:
        entries: Numbers of entries at the inspections.
        steps: Step numbers of the same inspections.
    """
    if len(entries) < 3:
        return False
    n_before, n_now = steps[-2] - steps[0], steps[-1] - steps[-2]
    before, now = entries[-2] - entries[0], entries[-1] - entries[-2]
    return 2 * now * max(1, n_before) < before * max(1, n_now)


def collect_storages(retained: Iterable[RetainedObject]) -> dict[int, int]:
    """Map each storage that the objects hold to its bytes."""
    return {number: n_bytes for item in retained for number, n_bytes in item.storages.items()}


def count_held_entries(retained: Iterable[RetainedObject]) -> int:
    """Count the entries of all containers through which one holder keeps the tensors of `retained`.

    Without containers, count tuple elements, attributes such as `h1` and `h2`, or suspended generators instead, if
    there are at least LEAST_PARTS of them.
    """
    containers: dict[int, int] = {}
    parts: set[str] = set()
    for item in retained:
        if item.holder is not None:
            containers = merged(containers, item.holder.containers)
            is_of_several = item.holder.kind == "generator"  # each has a frame of its own
            parts.add(f"{item.holder.text} {min(item.storages, default=0) if is_of_several else ''}")
    return sum(containers.values()) or (len(parts) if len(parts) >= LEAST_PARTS else 0)
