"""Steps that call the model unlike the rehearsed ones, such as a gradient penalty in every sixteenth step.

Each runs under the plan with the smallest peak, and the first of each form is measured. Where they are many, the steps
are rehearsed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from lowtide.errors import RehearsalError
from lowtide.profiler.online import PATIENCE
from lowtide.runtime.known_calls import KnownCalls
from lowtide.runtime.live_optimizers import find_optimizers
from lowtide.runtime.plan_messages import MEASURED
from lowtide.script.later_steps import LaterSteps
from lowtide.script.plan_monitor import Measured
from lowtide.state.process_group import several_processes
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from lowtide.api.apply import Applied
    from lowtide.utils.amounts import BudgetFor

MANY: Final = 4
"""Number of such steps, if they are also one in `MANY` updates, after which the steps are rehearsed again."""


class UnlikeSteps:
    """Counter and measurements of steps whose calls of the planned model, or backward passes, differ from the rehearsed
    ones.
    """

    def __init__(self, calls: KnownCalls, budget_for: BudgetFor, say: Callable[[str], None]) -> None:
        """Begin with no such step counted. `calls` holds the calls of the rehearsed steps; `say` is called with
        messages.
        """
        self.calls = calls
        self.open: Measured | None = None
        """The step in progress, if it is measured."""
        self._said: set[str] = set()
        self._most_bytes = 0
        """Largest measured peak of such a step."""
        self.n_steps = 0
        """Number of steps under a plan, measured or not, counted by the owner."""
        self._n, self._first_at, self._last_backward = 0, 0, 0
        self._between: Measured | None = None
        """Recording of the time since the last step, if it is recorded."""
        self._has_recorded = self._has_looked = False
        """True once steps were measured because of a backward pass unlike those so far."""
        self._budget_for, self._say = budget_for, say

    def _measure(self, applied: Applied, model: nn.Module, batch: Any, *, with_coming: bool) -> Measured:
        optimizers, budget_for = tuple(find_optimizers(model)), self._budget_for
        return Measured(model, batch, optimizers, applied, budget_for, is_checked=False, with_coming=with_coming)

    def begin(
        self, applied: Applied | None, model: nn.Module, batch: Any, what: str, *, n_updates: int, with_coming: bool
    ) -> None:
        """Count a step that differs from the rehearsed steps, and begin to measure it if it is the first of its form.

        `what` is a clause that describes the difference, `batch` has the arguments of the call that differs, and
        `applied` is the plan in force.
        """
        self._first_at = self._first_at if self._n else n_updates
        self._n += 1
        if what in self._said:
            return
        self._said.add(what)
        self._say(f"{what}, unlike the rehearsed ones: such steps run under the plan with the smallest peak")
        if applied is not None and not several_processes():
            with contextlib.suppress(RehearsalError):  # another recording is active
                self.open = self._measure(applied, model, batch, with_coming=with_coming)

    def notice_backward(self, what: str, later: LaterSteps) -> None:
        """Let `later` measure the next steps, because a backward pass differed from all earlier ones, and more such
        passes may follow.

        `what` is a clause that describes the difference. From the second time on, measurements begin just before such a
        pass is expected again.
        """
        if what not in self._said:
            self._said.add(what)
            self._say(f"{what}, unlike in the measured ones: its peak may be above the budget. {MEASURED}")
        period, self._last_backward = self.n_steps - self._last_backward, self.n_steps
        later.is_different = True
        later.come_at(later.n_updates + (max(0, period - PATIENCE // 2) if self._has_looked else 0))
        self._has_looked = True

    def begin_between(self, applied: Applied | None, model: nn.Module, *, with_coming: bool) -> None:
        """Begin to record memory between two steps, where the model is called without training. Only the first time is
        recorded.
        """
        if applied is None or self._has_recorded or several_processes():
            return
        with contextlib.suppress(RehearsalError):
            self._between = self._measure(applied, model, (), with_coming=with_coming)
            self._has_recorded = True

    def end_between(self, n_calls: int, budget_bytes: int) -> None:
        """End the recording between two steps, and report if its peak is above the budget.

        `n_calls` is the number of calls of the model without training.
        """
        if self._between is None:
            return
        peak_bytes, self._between = self._between.peak_bytes(), None
        if peak_bytes > budget_bytes:
            peak, over = format_bytes(peak_bytes), format_bytes(peak_bytes - budget_bytes)
            self._say(
                f"measured {peak} peak between two steps, in {n_calls} calls of the model without training, {over} "
                "over the budget: what a rollout or an evaluation holds there is not planned for. Free the tensors of "
                "the last one before the next, or give a budget with room for both"
            )

    def record_peak(self, measured_bytes: int) -> bool:
        """Record the peak of a step that differs from the rehearsed steps; return True if it is the largest such peak
        so far.
        """
        is_most = measured_bytes > self._most_bytes
        self._most_bytes = max(self._most_bytes, measured_bytes)
        return is_most

    def end_count_if_many(self, n_updates: int) -> bool:
        """Return True, and count from zero again, if enough steps differed from the rehearsed steps to rehearse
        again.
        """
        are = self._n >= MANY and self._n * MANY > n_updates - self._first_at
        self._n = 0 if are else self._n
        return are

    def leave(self) -> None:
        """End measurements and recordings that are in progress. Repeated calls do nothing."""
        for each in (self.open, self._between):
            if each is not None:
                each.leave()
        self.open = self._between = None
