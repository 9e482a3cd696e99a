"""What an audit found, as it would be on a batch of another size: for loops in which hardly two batches have one.

How large the saved tensors are on the other batch is known from a step on it. What is only made on the way to them, and
what making takes, is taken to grow as they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from lowtide.profiler.drafts import CallDraft, SlotDraft, ValueDraft


def resized(
    values: Sequence[ValueDraft],
    slots: Sequence[SlotDraft],
    calls: Sequence[CallDraft],
    audited: Sequence[int],
    found: Sequence[int],
) -> tuple[list[ValueDraft], list[CallDraft]]:
    """Values and calls of a step whose slots have `found` elements each, where in the audit they had `audited`."""
    growth = [Fraction(now, before) if before else Fraction(1) for before, now in zip(audited, found, strict=True)]
    of_value = _of_values(values, slots, growth)
    overall = Fraction(sum(found), max(1, sum(audited)))
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
            for index, value in enumerate(values)
        )
    ]
    return larger, [_resized(call, audited, found) for call in calls]


def _of_values(
    values: Sequence[ValueDraft], slots: Sequence[SlotDraft], growth: Sequence[Fraction]
) -> dict[int, Fraction]:
    """How much each value grows: as the slots that hold it, else as the most that is made of it."""
    saved: dict[int, Fraction] = {}
    for slot, by in zip(slots, growth, strict=True):
        saved[slot.value] = max(by, saved.get(slot.value, by))
    found = dict(saved)
    pending = list(saved)
    for index in pending:  # grows while it runs
        for need in values[index].operands:
            if need not in saved and found.get(need, Fraction(0)) < found[index]:
                found[need] = found[index]
                pending.append(need)
    return found


def _resized(call: CallDraft, audited: Sequence[int], found: Sequence[int]) -> CallDraft:
    mine = slice(call.first_slot, call.stop_slot)
    by = Fraction(sum(found[mine]), max(1, sum(audited[mine])))
    return replace(
        call,
        cost_ms=call.cost_ms * float(by),
        flops=_times(call.flops, by),
        advance_ms=call.advance_ms * float(by),
        advance_flops=_times(call.advance_flops, by),
    )


def _times(count: int, by: Fraction) -> int:
    """Rounded up: what a plan may need is not to be less than it will."""
    return -(-count * by.numerator // by.denominator)
