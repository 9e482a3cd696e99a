"""Time the sections of a plain step on the clocks of host and device, between calls of the model's outer modules.

The step is run twice. One run times the host, which never waits for the device. The other run times the device: every
section is queued behind a kernel that sleeps for longer than the host took to launch the section, so that the device
never waits for a launch within the section. A section ends where a module is called in forward, and where backward
reaches a module's result.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch.compiled_code import anything_compiled
from lowtide._torch.device_timing import has_two_clocks, make_timing_event, now_ms, occupy
from lowtide.planner.records import StepClocks
from lowtide.profiler.slot_costs import slot_costs
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fingerprint import find_device
from lowtide.state.step_outcome import is_out_of_memory

if TYPE_CHECKING:
    from torch import nn
    from torch.autograd.graph import Node

    from lowtide.profiler.trial_updates import Updates

MOST_MODULES = 64
"""Largest number of modules whose calls are timed, the outer ones first: each costs the host a few microseconds."""
AHEAD = 2.0
"""Time for which the device is kept busy before a section, as a multiple of the host's time to launch the section."""
LEAST_AHEAD_MS = 0.05


class Boundary(NamedTuple):
    """The module call, in forward or in backward, with which a section begins."""

    call: str
    """Path and number of the call: `transformer.h.3#0`."""
    in_backward: bool


START = Boundary("", False)
"""Boundary at the beginning of the step."""


@dataclass(frozen=True, slots=True)
class TimedSections:
    """Times of a plain step's sections, in order; the first begins with the step."""

    boundaries: tuple[Boundary, ...]
    host_ms: tuple[float, ...]
    device_ms: tuple[float, ...]
    kept_slot_ms: float = 0.0
    packed_slot_ms: float = 0.0

    def spread(self, positions: Mapping[bool, Mapping[str, list[int]]], end: int) -> StepClocks:
        """Return the times at each of `end` positions: each section's times are spread evenly over its positions.

        `positions` has the positions at which each call begins, in forward (False) and in backward (True). A section
        without a known position, or with a position before its predecessor's, is counted with its predecessor.
        """
        starts, times = [0], [[0.0, 0.0]]
        for (call, in_backward), *both in zip(self.boundaries, self.host_ms, self.device_ms, strict=True):
            start = min(positions[in_backward].get(call, ()), default=-1)
            if starts[-1] < start < end:
                starts.append(start)
                times.append([0.0, 0.0])
            times[-1] = [one + other for one, other in zip(times[-1], both, strict=True)]
        host, device = [0.0] * end, [0.0] * end
        for start, stop, (host_ms, device_ms) in zip(starts, [*starts[1:], end], times, strict=True):
            for position in range(start, stop):
                host[position], device[position] = host_ms / (stop - start), device_ms / (stop - start)
        return StepClocks(
            host_ms=tuple(host),
            device_ms=tuple(device),
            kept_slot_ms=self.kept_slot_ms,
            packed_slot_ms=self.packed_slot_ms,
        )


def time_sections(model: nn.Module, updates: Updates, batch: Any) -> TimedSections | None:
    """Return the times of the plain step's sections; None if host and device are one resource (a CPU), or if timing
    fails.

    Runs the step twice, each time from the state that `updates` restores.
    """
    place = find_device(model)
    if not has_two_clocks(place) or anything_compiled():  # hooks would make torch recompile compiled modules
        return None

    def run() -> None:
        updates.undo()
        updates.step(batch)

    try:
        host = HostClock(place)
        with boundaries(model, host.reach):
            run()
        host_ms = host.stop()
        device = DeviceClock(place, host_ms)
        with boundaries(model, device.reach):
            run()
        device_ms = device.stop()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    if host.boundaries != device.boundaries:  # the two runs called different modules
        return None
    kept_ms, packed_ms = slot_costs()
    return TimedSections(tuple(host.boundaries), tuple(host_ms), tuple(device_ms), kept_ms, packed_ms)


class HostClock:
    """Times of the host between boundaries, which are module calls in forward or in backward."""

    def __init__(self, place: torch.device) -> None:
        self.boundaries = [START]
        now_ms(place)  # the device has finished all earlier work
        self._times = [time.perf_counter()]

    def reach(self, boundary: Boundary) -> None:
        """End the current section, and begin the section that starts with `boundary`."""
        self.boundaries.append(boundary)
        self._times.append(time.perf_counter())

    def stop(self) -> list[float]:
        """Return the milliseconds of each section."""
        times = [*self._times, time.perf_counter()]
        return [(after - before) * 1000 for before, after in pairwise(times)]


class DeviceClock:
    """Times of a GPU between boundaries. A kernel occupies the GPU before each section, while the host launches the
    section.
    """

    def __init__(self, place: torch.device, host_ms: list[float]) -> None:
        self.boundaries: list[Boundary] = []
        self._place, self._host_ms = place, host_ms
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        now_ms(place)
        self.reach(START)

    def reach(self, boundary: Boundary) -> None:
        """End the current section, and begin the section that starts with `boundary`, after a kernel that occupies the
        GPU.
        """
        if self._events:
            self._events[-1][1].record()
        number = min(len(self.boundaries), len(self._host_ms) - 1)
        self.boundaries.append(boundary)
        occupy(max(LEAST_AHEAD_MS, AHEAD * self._host_ms[number]))
        first, last = make_timing_event(), make_timing_event()
        first.record()
        self._events.append((first, last))

    def stop(self) -> list[float]:
        """Return the milliseconds of each section."""
        self._events[-1][1].record()
        now_ms(self._place)
        return [first.elapsed_time(last) for first, last in self._events]


@contextmanager
def boundaries(model: nn.Module, reach: Callable[[Boundary], None]) -> Iterator[None]:
    """Call `reach` inside this `with` block whenever an outer module of `model` is called, and when backward reaches
    its result.
    """
    numbers: Counter[str] = Counter()
    results: list[Any] = []

    def enters(path: str) -> None:
        reach(Boundary(f"{path}#{numbers[path]}", False))

    def leaves(path: str, result: Any) -> None:
        call = f"{path}#{numbers[path]}"
        numbers[path] += 1
        node: Node | None = next((t.grad_fn for t in collect_tensors(result) if t.grad_fn is not None), None)
        if node is not None:
            results.append(node.register_prehook(lambda _: reach(Boundary(call, True))))

    with ExitStack() as stack:
        for path, module in list_outer_modules(model):
            before = module.register_forward_pre_hook(lambda _module, _args, path=path: enters(path))
            after = module.register_forward_hook(lambda _module, _args, result, path=path: leaves(path, result))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield
    for hook in results:
        hook.remove()


def list_outer_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the first MOST_MODULES modules inside the model, the outer ones first."""
    named = [(path, module) for path, module in model.named_modules() if path]
    return sorted(named, key=lambda pair: pair[0].count("."))[:MOST_MODULES]
