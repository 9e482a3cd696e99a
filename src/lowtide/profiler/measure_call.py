"""Measure a trial run: its time, its FLOPs, and its results bit for bit."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.flop_counter import flop_registry

from lowtide._torch.compiled_code import anything_compiled
from lowtide._torch.device_timing import Stopwatch, Times, has_two_clocks, now_ms
from lowtide._torch.modes import TorchDispatchMode
from lowtide._torch.nodes import get_packet
from lowtide.profiler.drafts import ValueDraft
from lowtide.profiler.trace_marks import TRACE, RecomputeEnded, RecomputeStarted
from lowtide.runtime.advance import Advance, find_result_node
from lowtide.runtime.replay import ReplayFrame
from lowtide.state.bitwise import identical

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.recompute import Recompute

T = TypeVar("T")

CAN_GO_WRONG = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""Exceptions that a second run of a call may raise if the call must not be run twice."""

SHORT_MS = 20.0
"""Time in ms below which a run is timed a second time."""


def count_attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention's two matrix products.

    Replaces torch's formula, which before torch 2.13 refuses keys with fewer heads than the queries.
    """
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


FORMULAS = flop_registry | {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"): count_attention_flops
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
}
"""Torch's formulas, with one for attention of any kind."""


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of FLOPs in forward. For trial runs only, because autograd records other operators under a dispatch
    mode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(get_packet(func))
        if formula is not None:
            with contextlib.suppress(
                AssertionError, *CAN_GO_WRONG
            ):  # torch's formula does not handle these shapes: count nothing
                self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


class Meter:
    """Measurement of trial runs, in time and FLOPs: of each run of a recipe, and of module calls that run again."""

    def __init__(self, mark: Callable[[str, object], None], place: torch.device) -> None:
        """Measure on the device `place`; `mark` marks each run of a recipe in the recording."""
        self._mark, self.place = mark, place
        self.flops = Flops()
        self._runs: list[ValueDraft] = []
        """Runs in order; `RecomputeEnded` has the index."""
        self._last: weakref.WeakKeyDictionary[Recompute, int] = weakref.WeakKeyDictionary()
        """Number of the last run of each recompute, which keeps no recompute and so none of its constants alive."""
        self._watch = Stopwatch(place)
        self._flops_before = 0

    def start(self) -> None:
        """Start the measurement of a recipe that is about to run."""
        self._mark(TRACE, RecomputeStarted())
        self._flops_before = self.flops.total
        self._watch.start()

    def stop(self, maker: Recompute, result: Tensor) -> None:
        """Record the run of `maker` that has computed `result`.

        A recompute that runs several times counts with its least time and its most FLOPs, because not all runs count
        FLOPs.
        """
        host_ms, cost_ms = self._watch.stop()
        flops = self.flops.total - self._flops_before
        number = len(self._runs)
        self._mark(TRACE, RecomputeEnded(number))
        if maker in self._last:
            before = self.of(maker)
            cost_ms, host_ms = min(cost_ms, before.cost_ms), min(host_ms, before.host_ms)
            flops = max(flops, before.flops)
        self._last[maker] = number
        size = 0 if maker.recipe.alias else result.numel() * result.element_size()
        self._runs.append(
            ValueDraft(bytes=size, node=maker.recipe.node, cost_ms=cost_ms, host_ms=host_ms, flops=flops, spent=number)
        )

    def of(self, maker: Recompute) -> ValueDraft:
        """Return the draft that holds the costs measured for the recompute `maker`, which has run."""
        return self._runs[self._last[maker]]

    def forget(self) -> None:
        """Forget the runs of all recomputes so far."""
        self._last.clear()

    def timed(
        self,
        run: Callable[[], T],
        eagerly: Callable[[], object],
        excluded_ms: Callable[[], float] = lambda: 0.0,
        quietly: Callable[[], object] | None = None,
    ) -> tuple[T, Times, int]:
        """Call `run`; return its result, times and FLOPs. A short run is repeated, because counting FLOPs takes time.

        `excluded_ms` returns the time so far that does not count as time of `run`. Where host and device have separate
        clocks, `quietly` is timed: the same work without the instrumentation of `run`; by default `run` itself.

        Operators in compiled code are invisible, and a dispatch mode around it would make the compiler give up for
        good. So where code may be compiled, FLOPs are counted in a separate run: `eagerly`, which does the same work
        without compiled code. If `eagerly` fails, the work counts as 0 FLOPs.
        """
        before, compiled = self.flops.total, anything_compiled()
        began = now_ms(self.place) - excluded_ms()
        with contextlib.nullcontext() if compiled else self.flops:
            result = run()
        took_ms = now_ms(self.place) - excluded_ms() - began
        if compiled:
            with contextlib.suppress(*CAN_GO_WRONG), torch.compiler.set_stance("force_eager"), self.flops:
                eagerly()
        counted = self.flops.total - before
        if has_two_clocks(self.place):
            watch = Stopwatch(self.place)
            watch.start(ahead_ms=took_ms)
            (run if quietly is None else quietly)()
            return result, watch.stop(), counted
        if took_ms < SHORT_MS:
            del result
            began = now_ms(self.place) - excluded_ms()
            result = run()
            took_ms = min(took_ms, now_ms(self.place) - excluded_ms() - began)
        return result, Times(0.0, took_ms), counted


def advance(frame: ReplayFrame, returned: Any, meter: Meter) -> tuple[Tensor, Times, int] | None:
    """Run the call of `frame` forward again, only for its result, and compare the result with the original.

    Returns the original result tensor in `returned`, and the times and FLOPs of the second run. Returns None if the
    second run is not possible, or if its result has other bits.
    """
    node = find_result_node(frame, returned)
    if node is None:
        return None
    tensor, base, _, _ = node
    try:
        forward = Advance(frame, frame.operands, tensor, base).forward
        made, took, counted = meter.timed(forward, frame.run_forward_again)
    except CAN_GO_WRONG:
        return None
    return (tensor, took, counted) if identical(made, base) else None
