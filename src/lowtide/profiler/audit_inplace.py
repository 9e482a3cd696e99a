"""Audit of gradients in place (`runtime/inplace_gradients.py`): each is written so once and compared bit by bit.

There torch's kernel runs first, and what it gives is what backward goes on with. Then the gradient, which nobody needs
any longer, is written over; if that gives other bits, no gradient of such nodes is in a plan.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.device_timing import now_ms
from lowtide.memory.events import most_between
from lowtide.planner import records
from lowtide.profiler.measure_call import CAN_GO_WRONG
from lowtide.runtime.inplace_gradients import MIN_BYTES, InPlace, available
from lowtide.runtime.inplace_kernels import OPERATORS, Operator
from lowtide.state.bitwise import identical

if TYPE_CHECKING:
    from lowtide.memory.events import EventStream
    from lowtide.profiler.trace_reader import MemoryLevels

LARGE: Final = 0.5
"""What takes time is done for gradients from this share of the largest on, which are those at a peak."""


@dataclass(frozen=True, slots=True)
class InPlaceGroup:
    """Gradients that are all written in place, or none of them."""

    nodes: dict[str, int]
    """Kind of node -> bytes from which on its gradients are."""
    extra_ms: float
    """What it takes a step."""
    own_bytes: dict[tuple[str, int], int]
    """For such a node and the bytes of its gradient, what torch's own kernel allocates."""


class AuditInPlace(InPlace):
    """Tries every gradient that could be written in place."""

    def __init__(self, device: torch.device, mark: Callable[[str, object], None]) -> None:
        super().__init__(device.type, alone=True)
        self.of_all(dict.fromkeys(available(device.type), MIN_BYTES))
        self._place, self._mark = device, mark
        self._own_bytes: dict[tuple[str, int], int] = {}
        self._more_ms: dict[tuple[str, int], list[float]] = defaultdict(list)
        """By node and bytes of its gradient, for each how much longer it took in place."""
        self._refused: set[str] = set()

    def run(self, operator: Operator, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """What torch's kernel gives."""
        key = operator.node, args[0].numel() * args[0].element_size()
        self._mark("own", None)
        began = now_ms(self._place)
        expected = own(*args, **kwargs)
        own_ms = now_ms(self._place) - began
        self._mark("owned", key)
        began = now_ms(self._place)
        try:
            found = operator.write(own, *args, **kwargs)
        except CAN_GO_WRONG:
            self._refused.add(operator.node)
            return expected
        self._more_ms[key].append(max(0.0, now_ms(self._place) - began - own_ms))
        if not _same(expected, found):
            self._refused.add(operator.node)
        return expected

    def settle(self, stream: EventStream) -> list[InPlaceGroup]:
        """The step is over, and this was recorded: what can be done in place, that which takes no time first."""
        self._own_bytes = _allocated(stream)
        calls = {key: more for key, more in sorted(self._more_ms.items()) if key[0] not in self._refused}
        free = {node: MIN_BYTES for node, _ in calls if not OPERATORS[node].piecewise}
        slow = {(node, n): more for (node, n), more in calls.items() if OPERATORS[node].piecewise}
        least = max(int(LARGE * max((n for _, n in slow), default=0)), MIN_BYTES)
        large = {key: more for key, more in slow.items() if key[1] >= least}
        found = (free, 0.0), (dict.fromkeys((node for node, _ in large), least), sum(map(_ms, large.values())))
        return [
            InPlaceGroup(nodes, ms, {key: n for key, n in self._own_bytes.items() if key[0] in nodes})
            for nodes, ms in found
            if nodes
        ]


def _ms(calls: list[float]) -> float:
    """What calls that do the same work take: each the least that was measured."""
    return len(calls) * min(calls)


def _allocated(stream: EventStream) -> dict[tuple[str, int], int]:
    """The most that torch's own kernels allocated at once, by node and bytes of the gradient."""
    found: dict[tuple[str, int], int] = defaultdict(int)
    for call, n_bytes in most_between(stream, "own", "owned"):
        assert isinstance(call, tuple)
        found[call] = max(found[call], n_bytes)
    return found


def _same(expected: Any, found: Any) -> bool:
    """Whether these are the same bits, laid out alike."""
    both = ((each if isinstance(each, tuple) else (each,)) for each in (expected, found))
    return all(_same_tensor(one, other) for one, other in zip(*both, strict=True))


def _same_tensor(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return identical(one, other)


def with_their_own(groups: Sequence[InPlaceGroup], levels: MemoryLevels) -> tuple[int, ...]:
    """`levels.most`, if these gradients had memory of their own."""
    found = list(levels.most)
    for position, level, key in levels.written:
        own_bytes = max((group.own_bytes.get(key, 0) for group in groups), default=0)
        found[position] = max(found[position], level + own_bytes)
    return tuple(found)


def in_place(groups: Sequence[InPlaceGroup], levels: MemoryLevels) -> tuple[records.InPlace, ...]:
    """As a profile has them; `levels` are of a step with all of them."""
    base = [with_their_own(groups[n:], levels) for n in range(len(groups) + 1)]
    saved = [tuple(a - b for a, b in zip(*both, strict=True)) for both in itertools.pairwise(base)]
    return tuple(
        records.InPlace(nodes=group.nodes, saved_bytes=each, extra_ms=group.extra_ms)
        for group, each in zip(groups, saved, strict=True)
        if any(each)
    )
