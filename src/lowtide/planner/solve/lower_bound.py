"""What no plan can beat: a lower bound on the extra time of any plan within a budget.

The linear program of `linear_program.py`, with shares instead of decisions, for the positions where the plain step
peaks and then also for those where its answer is over the limit; at last with decisions, where branch and bound is
quick. Every one of these programs leaves out rows only, so that each answer is a valid bound and the last is the best.
Plans that fit are never below it; how far above tells how much a better solver could gain at most.

It bounds predicted time: costs are those that the rehearsal measured. Not yet: scratch memory, for which the bound is a
little low at the smallest budgets.
"""

from __future__ import annotations

import numpy as np

from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.linear_program import covering_of
from lowtide.planner.solve.milp import Programme, is_over

SLACK = 1e-6
"""Share of all costs by which HiGHS may be off."""


def lower_bound(
    simulator: Simulator, budget_bytes: int, *, known_ms: float = np.inf, until: float | None = None
) -> float:
    """Milliseconds that every plan takes, at least, whose peak is at most `budget_bytes`; infinite if there is none.

    `known_ms` is what some plan takes that fits: a bound close to it, or far below it, is not worth the time that it
    takes to raise it. At `until` (by `time.monotonic()`) what is left to improve it is left out; it stays a bound.
    """
    covering = covering_of(simulator)
    limit = budget_bytes - simulator.profile.static.total
    if limit <= 0:
        return np.inf if int(covering.base.max()) > limit else 0.0
    programme = Programme(covering, limit, covering.ms, until=until)
    slack = SLACK * float(covering.ms.sum())
    shares = programme.relaxed().bound
    if shares in (0.0, np.inf):
        return shares
    if is_over(until):
        return max(0.0, shares - slack)
    return max(0.0, shares - slack, programme.bound(known_ms) - slack)
