"""Modules whose saved tensors differ between steps, such as a recurrent layer on the CPU if sequence lengths vary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class CallShape:
    """A module call: its path, the call around it, and the number of tensors that it saved itself."""

    path: str
    parent: int | None
    n_saved: int = 0


def find_differing_modules(one: Sequence[CallShape], other: Sequence[CallShape]) -> frozenset[str]:
    """Return the paths of the innermost modules with a call that differs between two steps.

    The path "" stands for the model, and for the code that calls it.
    """
    return frozenset(_uneven(_Step(one), _Step(other), None, None))


def list_modules_called_by(path: str, calls: Sequence[CallShape]) -> frozenset[str]:
    """Return the paths of the modules that the module at `path` called directly."""
    return frozenset(call.path for call in calls if call.parent is not None and calls[call.parent].path == path)


class _Step:
    def __init__(self, calls: Sequence[CallShape]) -> None:
        self.calls = calls
        self.inside: dict[int | None, list[int]] = {}
        for index, call in enumerate(calls):
            self.inside.setdefault(call.parent, []).append(index)

    def list_calls_in(self, index: int | None) -> list[int]:
        return self.inside.get(index, [])

    def looks(self, index: int | None) -> tuple[int, list[str]]:
        """Return the number of tensors that the call at `index` saved itself, and the paths of the calls directly
        inside it.

        None stands for the code around the model's outermost calls, which saves nothing.
        """
        n_saved = 0 if index is None else self.calls[index].n_saved
        return n_saved, [self.calls[child].path for child in self.list_calls_in(index)]


def _uneven(one: _Step, other: _Step, call: int | None, other_call: int | None) -> Iterator[str]:
    if one.looks(call) != other.looks(other_call):
        yield "" if call is None else one.calls[call].path
        return
    for pair in zip(one.list_calls_in(call), other.list_calls_in(other_call), strict=True):
        yield from _uneven(one, other, *pair)
