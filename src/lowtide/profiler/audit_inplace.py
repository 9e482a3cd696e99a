"""Audit of in-place gradients: write each gradient over the incoming gradient once, and compare it bit by bit with the
result of torch's kernel (`runtime/inplace_gradients.py`).

Torch's kernel runs first, and backward continues with its result. Then the incoming gradient, which has no reader left,
is written over; if the in-place result has other bits, no gradient of such nodes is in a plan.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.device_timing import now_ms
from lowtide.memory.events import compute_peaks_between
from lowtide.planner import records
from lowtide.profiler.measure_call import CAN_GO_WRONG
from lowtide.profiler.trace_marks import TRACE, OwnKernelEnded, OwnKernelStarted
from lowtide.runtime.inplace_gradients import MIN_BYTES, InPlacePermission, available
from lowtide.runtime.inplace_kernels import OPERATORS, Operator
from lowtide.state.bitwise import identical

if TYPE_CHECKING:
    from lowtide.memory.events import EventStream
    from lowtide.profiler.trace_reader import MemoryLevels

LARGE: Final = 0.5
"""Smallest size, as a share of the largest gradient, of a gradient that is written in place although that takes extra
time. Smaller gradients are mostly not part of the peak.
"""


@dataclass(frozen=True, slots=True)
class InPlaceGroup:
    """Gradients that a plan writes in place either all or not at all."""

    nodes: dict[str, int]
    """Kind of node -> smallest size in bytes of its gradients in the group."""
    extra_ms: float
    """Extra time per step in ms."""
    own_bytes: dict[tuple[str, int], int]
    """Bytes that torch's own kernel allocates, by node and bytes of its gradient."""


class AuditInPlace(InPlacePermission):
    """Trial of every gradient that could be written in place."""

    def __init__(self, device: torch.device, mark: Callable[[str, object], None]) -> None:
        super().__init__(device.type, alone=True)
        self.of_all(dict.fromkeys(available(device.type), MIN_BYTES))
        self._place, self._mark = device, mark
        self._own_bytes: dict[tuple[str, int], int] = {}
        self._more_ms: dict[tuple[str, int], list[float]] = defaultdict(list)
        """Extra ms of each call in place, by node and bytes of its gradient."""
        self._refused: set[str] = set()

    def run(self, operator: Operator, own: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the result of torch's kernel, `own`, and compare it with the result of the in-place kernel."""
        key = operator.node, args[0].numel() * args[0].element_size()
        self._mark(TRACE, OwnKernelStarted())
        began = now_ms(self._place)
        expected = own(*args, **kwargs)
        own_ms = now_ms(self._place) - began
        self._mark(TRACE, OwnKernelEnded(*key))
        began = now_ms(self._place)
        try:
            result = operator.write(own, *args, **kwargs)
        except CAN_GO_WRONG:
            self._refused.add(operator.node)
            return expected
        self._more_ms[key].append(max(0.0, now_ms(self._place) - began - own_ms))
        if not _have_same_bits(expected, result):
            self._refused.add(operator.node)
        return expected

    def find_groups(self, stream: EventStream) -> list[InPlaceGroup]:
        """Return the groups of gradients that can be written in place, groups without extra time first.

        `stream` has the events of the whole step.
        """
        self._own_bytes = _allocated(stream)
        calls = {key: more for key, more in sorted(self._more_ms.items()) if key[0] not in self._refused}
        free = {node: MIN_BYTES for node, _ in calls if not OPERATORS[node].piecewise}
        slow = {(node, n): more for (node, n), more in calls.items() if OPERATORS[node].piecewise}
        least = max(int(LARGE * max((n for _, n in slow), default=0)), MIN_BYTES)
        large = {key: more for key, more in slow.items() if key[1] >= least}
        choices = (
            (free, 0.0),
            (dict.fromkeys((node for node, _ in large), least), sum(map(_sum_fastest_ms, large.values()))),
        )
        return [
            InPlaceGroup(nodes, ms, {key: n for key, n in self._own_bytes.items() if key[0] in nodes})
            for nodes, ms in choices
            if nodes
        ]


def _sum_fastest_ms(calls: list[float]) -> float:
    """Return the total ms of calls that do equal work, each counted at the time of the fastest call."""
    return len(calls) * min(calls)


def _allocated(stream: EventStream) -> dict[tuple[str, int], int]:
    """Return the peak bytes that torch's own kernels allocated, by the node's name and the size of the gradient."""
    most: dict[tuple[str, int], int] = defaultdict(int)
    for (node, gradient_bytes), n_bytes in compute_peaks_between(stream, OwnKernelStarted, OwnKernelEnded):
        most[node, gradient_bytes] = max(most[node, gradient_bytes], n_bytes)
    return most


def _have_same_bits(expected: Any, result: Any) -> bool:
    """Return True if two kernels' results, each a tensor or a tuple, have the same bits in the same layout."""
    both = ((output if isinstance(output, tuple) else (output,)) for output in (expected, result))
    return all(_same_tensor(one, other) for one, other in zip(*both, strict=True))


def _same_tensor(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return identical(one, other)


def with_their_own(groups: Sequence[InPlaceGroup], levels: MemoryLevels) -> tuple[int, ...]:
    """Return the peak bytes in `levels` at each position, as they would be without in-place writes of the gradients of
    `groups`.

    The traced step wrote these gradients in place. Without in-place writes, torch's kernels allocate memory for each.
    """
    most = list(levels.most)
    for position, level, key in levels.written:
        own_bytes = max((group.own_bytes.get(key, 0) for group in groups), default=0)
        most[position] = max(most[position], level + own_bytes)
    return tuple(most)


def in_place(groups: Sequence[InPlaceGroup], levels: MemoryLevels) -> tuple[records.InPlace, ...]:
    """Return `groups` as records of a profile, with the bytes that each saves at each position.

    `levels` are of a step with all groups in place.
    """
    base = [with_their_own(groups[n:], levels) for n in range(len(groups) + 1)]
    saved = [tuple(a - b for a, b in zip(*both, strict=True)) for both in itertools.pairwise(base)]
    return tuple(
        records.InPlace(nodes=group.nodes, saved_bytes=saved_bytes, extra_ms=group.extra_ms)
        for group, saved_bytes in zip(groups, saved, strict=True)
        if any(saved_bytes)
    )
