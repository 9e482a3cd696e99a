"""What a trial run is judged by: the time and FLOPs it takes, and whether its results are the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.flop_counter import flop_registry

from lowtide._torch.compiled_code import anything_compiled
from lowtide._torch.device_timing import now_ms
from lowtide._torch.modes import TorchDispatchMode
from lowtide._torch.nodes import packet_of
from lowtide.profiler.drafts import ValueDraft
from lowtide.runtime.advance import Advance, result_node
from lowtide.runtime.replay import ReplayFrame
from lowtide.state.bitwise import identical

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.recompute import Recompute

T = TypeVar("T")

CAN_GO_WRONG = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What a call may raise that is run again where it must not be."""

SHORT_MS = 20.0
"""What took less is timed once more."""


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """The two matrix products of attention. Torch's formula refuses keys of fewer heads than queries before 2.13."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


FORMULAS = flop_registry | {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"): attention_flops
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
}
"""Torch's formulas, with one for attention of any kind."""


class Flops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of forwards. For trial runs only: under a dispatch mode autograd records other ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(packet_of(func))
        if formula is not None:
            with contextlib.suppress(AssertionError, *CAN_GO_WRONG):  # one that refuses its arguments counts nothing
                self.total += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


class Meter:
    """What each run of a recipe took."""

    def __init__(self, mark: Callable[[str, object], None], flops: Flops, place: torch.device) -> None:
        self._mark, self._flops, self._place = mark, flops, place
        self._runs: list[ValueDraft] = []
        """In order; the marks `making` and `made` carry the index."""
        self._last: dict[Recompute, int] = {}
        self._begun = (0.0, 0)

    def making(self) -> None:
        """A recipe is about to run."""
        self._mark("making", len(self._runs))
        self._begun = now_ms(self._place), self._flops.total

    def made(self, maker: Recompute, result: Tensor) -> None:
        """Note a run. Of several runs of a recompute the least time counts, and the FLOPs of the run that has them."""
        began, flops = self._begun
        cost_ms = now_ms(self._place) - began
        flops = self._flops.total - flops
        number = len(self._runs)
        self._mark("made", number)
        if maker in self._last:
            before = self.of(maker)
            cost_ms, flops = min(cost_ms, before.cost_ms), max(flops, before.flops)
        self._last[maker] = number
        size = 0 if maker.recipe.alias else result.numel() * result.element_size()
        self._runs.append(ValueDraft(bytes=size, node=maker.recipe.node, cost_ms=cost_ms, flops=flops, spent=number))

    def of(self, maker: Recompute) -> ValueDraft:
        """What a recompute took."""
        return self._runs[self._last[maker]]

    def forget(self) -> None:
        """Hold no recompute any longer."""
        self._last.clear()


def timed(
    run: Callable[[], T],
    flops: Flops,
    place: torch.device,
    eagerly: Callable[[], object],
    aside_ms: Callable[[], float] = lambda: 0.0,
) -> tuple[T, float, int]:
    """What `run` gives, the milliseconds that it takes and its FLOPs. Short runs are run twice: counting takes time.

    `aside_ms` gives the time so far that is no part of what `run` takes.

    In compiled code no operators are seen, and a mode around it would have the compiler give it up for good. So where
    there may be any, FLOPs are counted in a run of their own: `eagerly`, which does the same work, without compiled
    code. Where that can't be run the work counts as none.
    """
    before, compiled = flops.total, anything_compiled()
    began = now_ms(place) - aside_ms()
    with contextlib.nullcontext() if compiled else flops:
        result = run()
    took_ms = now_ms(place) - aside_ms() - began
    if compiled:
        with contextlib.suppress(*CAN_GO_WRONG), torch.compiler.set_stance("force_eager"), flops:
            eagerly()
    counted = flops.total - before
    if took_ms < SHORT_MS:
        del result
        began = now_ms(place) - aside_ms()
        result = run()
        took_ms = min(took_ms, now_ms(place) - aside_ms() - began)
    return result, took_ms, counted


def advance(frame: ReplayFrame, returned: Any, flops: Flops, place: torch.device) -> tuple[Tensor, float, int] | None:
    """The result in what the call of `frame` `returned`, and the time and FLOPs of running it forward for that.

    None where it gives other bits, or can't be had so.
    """
    found = result_node(frame, returned)
    if found is None:
        return None
    tensor, base, _, _ = found
    try:
        forward = Advance(frame, frame.operands, tensor, base).forward
        made, took_ms, counted = timed(forward, flops, place, frame.forward_again)
    except CAN_GO_WRONG:
        return None
    return (tensor, took_ms, counted) if identical(made, base) else None
