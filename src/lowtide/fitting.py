"""The whole way in one call: rehearse, plan, verify, repair where the measured peak says so, apply."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lowtide.errors import Infeasible, OverBudget, RehearsalError, StalePlan
from lowtide.identity import fingerprint
from lowtide.planner import plan
from lowtide.planner.records import Plan, Profile
from lowtide.rehearsal import rehearse
from lowtide.remat.engine import Applied, apply
from lowtide.units import parse_budget
from lowtide.verification import Verdict, verify

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

REPAIRS = 4
"""Plans that are tried before a budget is given up: each aims lower by what the last one was over."""


class Fitted:
    """A model whose step fits: the plan in force, and its proof. `print` it; undo it with `remove()` or `with`."""

    def __init__(self, applied: Applied, profile: Profile, plan: Plan, verdict: Verdict) -> None:
        self.applied = applied
        self.profile = profile
        self.plan = plan
        self.verdict = verdict

    def remove(self) -> None:
        """Give the model back as it was."""
        self.applied.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        from lowtide.report.text import summary  # reports are made when somebody looks

        return summary(self.plan, self.verdict)


def fit(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    budget: int | str,
    optimizer: Optimizer | None = None,
    profile: Profile | None = None,
) -> Fitted:
    """Make `step(batch)` run within `budget` bytes at the least extra time, and prove it. The loop stays as it is.

    `budget` is bytes, `"8GiB"`, `"500MB"`, or `"60%"` of the plain step's peak; it is for all memory of the step:
    parameters, gradients, optimizer state and batch included. `step(batch)` runs forward and backward of `model` (and
    the optimizer if it likes) and is run about eight times here, after which parameters, gradients, buffers, optimizer
    state and random numbers are as they were. A `profile` from `rehearse` of the same step saves three of them.

    Returns with the plan applied to `model`. Raises Infeasible if no plan fits, with the smallest peak that one
    reaches; OverBudget if measured peaks stay above the budget; RehearsalError if the step can't be planned; StalePlan
    for a profile of something else. Then nothing is applied.
    """
    parse_budget(budget, of=sys.maxsize)  # nonsense is refused before anything runs
    if profile is None:
        profile = rehearse(model, step, batch, optimizer=optimizer)
    elif differences := profile.fingerprint.differences(fingerprint(model, batch)):
        raise StalePlan(f"this profile is not of this {type(model).__name__} and batch.", differences=differences)
    first = made = plan(profile, budget)
    measured: list[int] = []
    for _ in range(REPAIRS):
        verdict = verify(model, step, batch, made, optimizer=optimizer)
        if not verdict.identical:
            raise RehearsalError(_not_identical(verdict))
        if verdict.within_budget:
            return Fitted(apply(model, made), profile, made, verdict)
        measured.append(verdict.measured_peak_bytes)
        over = verdict.measured_peak_bytes - first.budget_bytes
        try:
            made = replace(plan(profile, max(1, made.predicted.peak_bytes - over)), budget_bytes=first.budget_bytes)
        except Infeasible:
            break
    raise OverBudget(budget_bytes=first.budget_bytes, measured_peak_bytes=min(measured))


def _not_identical(verdict: Verdict) -> str:
    found = {kind: names for kind, names in (verdict.differences or {}).items() if names}
    kinds = ", ".join(f"{kind} ({len(names)}, first {names[0]})" for kind, names in found.items())
    return (
        f"under the plan the step gave other bits than without it: {kinds}. If two plain steps from the same state "
        "differ too, make the step deterministic first (torch.use_deterministic_algorithms); if not, please report it."
    )
