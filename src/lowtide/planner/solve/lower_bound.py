"""Compute a lower bound on the extra time of any plan within a budget.

The bound is the linear program of `linear_program.py`, with shares instead of decisions, for the positions where the
plain step peaks and then also for those where its solution is over the limit; finally with decisions, if branch and
bound is quick. Each of these programs only omits rows, so that each solution is a valid bound and the last is the best.
Plans that fit are never below the bound; their distance limits the gain of a better solver.

The bound is on predicted time: costs are those that the rehearsal measured. Not yet: scratch memory, for which the
bound is a little low at the smallest budgets.
"""

from __future__ import annotations

import numpy as np

from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.linear_program import get_covering
from lowtide.planner.solve.milp import MilpProblem, is_over

SLACK = 1e-6
"""Share of all costs that is subtracted from the bound, for HiGHS's tolerance."""


def lower_bound(
    simulator: Simulator, budget_bytes: int, *, known_ms: float = np.inf, until: float | None = None
) -> float:
    """Return a lower bound on the extra milliseconds of any plan whose peak is at most `budget_bytes`.

    The bound is infinite if no plan can fit. `known_ms` is the extra time of some plan that fits: a bound that is close
    to it, or far below, is not improved further. Neither is any bound after `until` (by `time.monotonic()`).
    """
    covering = get_covering(simulator)
    limit = budget_bytes - simulator.profile.static.total
    if limit <= 0:
        return np.inf if int(covering.memory.base.max()) > limit else 0.0
    problem = MilpProblem(covering, limit, covering.costs.ms, until=until)
    slack = SLACK * float(covering.costs.ms.sum())
    shares = problem.solve_relaxation().bound
    if shares in (0.0, np.inf):
        return shares
    if is_over(until):
        return max(0.0, shares - slack)
    return max(0.0, shares - slack, problem.tighten_bound(known_ms) - slack)
