"""The schedule by which steps are measured, or rehearsed again, once a plan is kept after measured steps.

Memory that the program allocates later, such as slow copies of the weights, is noticed in two ways: tensors are counted
after each of the first updates, then less and less often, and steps are measured now and then. Both take only a small
share of the loop's time. After a step that differs from the rehearsed ones, as in another phase of training, the next
steps are measured; if one is over the budget, the steps are rehearsed again. If the model itself has changed, they are
rehearsed again at once.
"""

from __future__ import annotations

from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

import torch

from lowtide.memory.measure import held_bytes
from lowtide.profiler.online import PATIENCE
from lowtide.state.process_group import several_processes

if TYPE_CHECKING:
    from lowtide.planner.records import Plan

FIRST_LOOK: Final = 12
"""Number of updates after which a step is measured first. Each next number is twice as large plus one, so not always
even: steps of two kinds may take turns.
"""
COUNTED_UPDATES: Final = 16
"""Number of first updates after each of which tensors are counted. After `n` updates, `n // COUNTED_UPDATES` further
ones pass until the next count.
"""
MOST_COUNTING: Final = 0.005
"""Largest share of the steps' time that later counts may take: the next count is put off accordingly. A count takes
some milliseconds, and a tenth of a second if Python has collected garbage since the last one.
"""
MOST_BETWEEN: Final = 501
"""Largest number of updates from one measured step to the next, if `MOST_TIME` allows that."""
MOST_TIME: Final = 0.1
"""Time of measured steps, as a share of all other steps' time, above which the next measured step is put off. It takes
as long as two ordinary steps of a large model, or a thousand of a tiny one.
"""
MOST_REHEARSALS: Final = 12
"""Largest number of times that changed steps are rehearsed."""


class LaterSteps:
    """The schedule of further measured and rehearsed steps in a loop whose plan is kept after measured steps."""

    def __init__(self) -> None:
        """Begin with nothing scheduled, because there is no plan yet."""
        self.n_updates = 0
        """Number of updates since a plan was kept after measured steps, counted by the owner."""
        self.due_at = inf
        """Number of updates after which steps are measured or rehearsed."""
        self.has_begun = False
        """True once a plan was kept after measured steps: a budget that no plan fits then no longer ends training."""
        self.is_rehearsing = False
        """True while the steps are rehearsed again."""
        self.is_different = False
        """True once a step was different from the rehearsed ones."""
        self.has_more_state = False
        """True once optimizers have state for parameters that no rehearsed step updated."""
        self.is_changed = False
        """True once the model has changed."""
        self.awaits_another_kind = False
        """True if steps are rehearsed because one did more than the rehearsed ones, though the model is the same."""
        self._n_to_measure = self._n_rehearsals = 0
        self._next_look: float = FIRST_LOOK
        self.counts_at = inf
        """Number of updates after which tensors are counted."""
        self._place = torch.device("cpu")
        self._room_bytes = self._held_bytes = self._least_held_bytes = 0
        """Bytes between measured peak and budget; bytes of tensors at the last count; the least of all counts."""
        self._held_since_s = self._measuring_since_s = self._measured_s = self._counted_s = 0.0
        """Time when a plan was first kept, plus the duration of the first counts; time when the step to
        measure began; time of all such steps, and of the later counts.
        """

    @property
    def is_measuring(self) -> bool:
        """Return True if the next step is measured."""
        return self._n_to_measure > 0

    def count(self) -> None:
        """Count the bytes of all tensors; schedule a measured step if their growth exceeds the room in the budget."""
        began_s = monotonic()
        self._held_bytes = held_bytes(self._place)
        self.counts_at = self.n_updates + max(1, self.n_updates // COUNTED_UPDATES)
        took_s = monotonic() - began_s
        if self.n_updates <= COUNTED_UPDATES:
            self._held_since_s += took_s  # not part of the steps' time
        else:
            self._counted_s += took_s
            self.counts_at = max(self.counts_at, self._predict_n_updates(MOST_COUNTING, self._counted_s))
        self._least_held_bytes = min(self._least_held_bytes, self._held_bytes)
        if self._held_bytes - self._least_held_bytes > self._room_bytes:
            self.come_soon()

    def plan_holds(self, place: torch.device, room_bytes: int, *, is_sure: bool) -> None:
        """Schedule the next measured step, now that the plan is kept after measured steps.

        The step is measured soon if later steps may need more memory (`is_sure` is False), or if steps have changed;
        otherwise after an interval that grows. Until then tensors on the device `place` are counted, and the budget has
        room for `room_bytes` more.
        """
        if self.has_begun:
            self._next_look = max(self._next_look, self.n_updates + FIRST_LOOK)
        else:
            self.has_begun, self._held_since_s = True, monotonic()
            if not is_sure:
                self._next_look = 1
        if not several_processes():  # one process would plan again alone
            self.due_at = 0 if self.is_changed or self.is_different or self.has_more_state else self._next_look
            self.counts_at, self._place, self._room_bytes = self.n_updates + 1, place, max(0, room_bytes)
            self._least_held_bytes = held_bytes(place)

    def come_soon(self) -> None:
        """Schedule a measurement or rehearsal right after the next update."""
        self.due_at = 0

    def come_at(self, n_updates: int) -> None:
        """Schedule the next measurement for when `n_updates` updates have been counted in all."""
        self.due_at = n_updates

    def end(self) -> None:
        """Measure no more steps, because another model is trained."""
        self.due_at = self.counts_at = inf

    def begin(self) -> None:
        """Begin to measure the next steps, or to rehearse them if the model has changed."""
        if self.n_updates >= self._next_look:
            self._next_look = max(FIRST_LOOK, self.n_updates + min(self.n_updates + 1, MOST_BETWEEN))
        self._n_to_measure = PATIENCE if self.is_different or self.has_more_state else 1
        self.due_at = self._next_look
        self._measuring_since_s = monotonic()
        if self.is_changed:
            self.rehearse()

    def measured(self) -> None:
        """Count a measured step that was within the budget."""
        self._n_to_measure -= 1
        self._least_held_bytes = max(self._least_held_bytes, self._held_bytes)
        now_s = monotonic()
        self._measured_s += now_s - self._measuring_since_s
        self._measuring_since_s = now_s
        if not self._n_to_measure:
            self.is_different = self.has_more_state = False
            if self.due_at:  # 0 if something has changed meanwhile
                self.due_at = max(self.due_at, self._predict_n_updates(MOST_TIME, self._measured_s))

    def _predict_n_updates(self, most: float, spent_s: float) -> float:
        """Return the number of updates at which `spent_s` seconds make up the share `most` of the time of ordinary
        steps.
        """
        others_s = monotonic() - self._held_since_s - self._measured_s - self._counted_s
        return self.n_updates * spent_s / (most * max(others_s, 1e-9))

    def can_rehearse(self, plan: Plan) -> bool:
        """Return True if changed steps can be rehearsed, for a new plan in place of `plan`."""
        return not (plan.graphs or several_processes()) and self._n_rehearsals < MOST_REHEARSALS

    def rehearse(self) -> None:
        """Request that the next steps are rehearsed, not measured."""
        self.awaits_another_kind, self.has_more_state = not self.is_changed, False
        self.is_rehearsing, self.is_changed, self._n_rehearsals = True, False, self._n_rehearsals + 1
        self.stop_measuring()

    def stop_measuring(self) -> None:
        """Measure no more steps for now."""
        self.is_different, self._n_to_measure = False, 0

    def give_up(self) -> None:
        """Request that no more steps are rehearsed or measured, now or later."""
        self.is_rehearsing, self.is_changed, self._n_rehearsals = False, False, MOST_REHEARSALS
        self.stop_measuring()
