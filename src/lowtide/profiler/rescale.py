"""Rescale audit results to another batch size, for loops whose batch size changes almost every step.

The sizes of saved tensors on the other batch are known from a step on that batch. Sizes of intermediates, and costs,
are assumed to grow in proportion, except the host's time, which is the same for any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from lowtide.profiler.drafts import CallDraft, StepDrafts


def resized(step: StepDrafts, traced: Sequence[int]) -> StepDrafts:
    """Return the drafts of a step like `step` on another batch, in which the slots have `traced` elements."""
    audited = [slot.n_elements for slot in step.slots]
    growth = [Fraction(now, before) if before else Fraction(1) for before, now in zip(audited, traced, strict=True)]
    of_value = _compute_growths(step, growth)
    overall = Fraction(sum(traced), max(1, sum(audited)))
    larger = [
        replace(
            value,
            bytes=_times(value.bytes, by),
            cost_ms=value.cost_ms * float(by),
            flops=_times(value.flops, by),
            transient_bytes=_times(value.transient_bytes, by),
        )
        for value, by in (
            (value, of_value.get(index, overall if value.state_of is None else Fraction(1)))
            for index, value in enumerate(step.values)
        )
    ]
    return StepDrafts(larger, step.slots, [_resized(call, audited, traced) for call in step.calls])


def _compute_growths(step: StepDrafts, growth: Sequence[Fraction]) -> dict[int, Fraction]:
    """Return the factor by which each value grows: the largest factor in `growth` among the slots that hold the value.

    A value in no slot grows like the values computed from it, by the largest of their factors.
    """
    saved: dict[int, Fraction] = {}
    for slot, by in zip(step.slots, growth, strict=True):
        saved[slot.value] = max(by, saved.get(slot.value, by))
    growth_of = dict(saved)
    pending = list(saved)
    for index in pending:  # grows while it runs
        for need in step.values[index].operands:
            if need not in saved and growth_of.get(need, Fraction(0)) < growth_of[index]:
                growth_of[need] = growth_of[index]
                pending.append(need)
    return growth_of


def _resized(call: CallDraft, audited: Sequence[int], traced: Sequence[int]) -> CallDraft:
    mine = slice(call.first_slot, call.stop_slot)
    by = Fraction(sum(traced[mine]), max(1, sum(audited[mine])))
    return replace(
        call,
        cost_ms=call.cost_ms * float(by),
        flops=_times(call.flops, by),
        advance_ms=call.advance_ms * float(by),
        advance_flops=_times(call.advance_flops, by),
    )


def _times(count: int, by: Fraction) -> int:
    """Return `count` times `by`, rounded up so that no plan's peak is underestimated."""
    return -(-count * by.numerator // by.denominator)
