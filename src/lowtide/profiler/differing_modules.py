"""Modules that save something else in each step, as a recurrent layer does on the CPU where lengths differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class CallShape:
    """A module call, by its path, the call that it is in, and how many tensors it saved itself."""

    path: str
    parent: int | None
    n_saved: int = 0


def modules_that_differ(one: Sequence[CallShape], other: Sequence[CallShape]) -> frozenset[str]:
    """Paths of the innermost modules of which a call did something else in the one step than in the other.

    With the model's own path, "", the steps have nothing else in common.
    """
    return frozenset(_uneven(_Step(one), _Step(other), None, None))


class _Step:
    def __init__(self, calls: Sequence[CallShape]) -> None:
        self.calls = calls
        self.inside: dict[int | None, list[int]] = {}
        for index, call in enumerate(calls):
            self.inside.setdefault(call.parent, []).append(index)

    def calls_in(self, index: int | None) -> list[int]:
        return self.inside.get(index, [])

    def looks(self, index: int | None) -> tuple[int, list[str]]:
        """What is to be seen of a call without looking into those inside of it."""
        n_saved = 0 if index is None else self.calls[index].n_saved
        return n_saved, [self.calls[child].path for child in self.calls_in(index)]


def _uneven(one: _Step, other: _Step, this: int | None, that: int | None) -> Iterator[str]:
    if one.looks(this) != other.looks(that):
        yield "" if this is None else one.calls[this].path
        return
    for pair in zip(one.calls_in(this), other.calls_in(that), strict=True):
        yield from _uneven(one, other, *pair)
