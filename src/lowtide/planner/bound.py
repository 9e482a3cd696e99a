"""What no plan can beat: a lower bound on the extra time of any plan within a budget.

The linear program of `covering.py`, with shares instead of decisions: solved by HiGHS (Huangfu and Hall 2018,
doi 10.1007/s12532-017-0130-5) at first for the positions where the plain step peaks, then also for those where its
answer is over the limit. Every one of these programs leaves out rows only, so that each answer is a valid bound and the
last is the best. Plans that fit are never below it; how far above tells how much a better solver could gain at most.

It bounds predicted time: costs are those that the rehearsal measured. Not yet: scratch memory, for which the bound is a
little low at the smallest budgets.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from lowtide.planner.covering import Covering, Floats, Row, matrix
from lowtide.planner.predict import Simulator

ROUNDS = 12
"""Programs that are solved for one bound."""
AT_ONCE = 6
"""Positions that are added from one round to the next."""
SLACK = 1e-6
"""Share of all costs by which HiGHS may be off."""


def lower_bound(simulator: Simulator, budget_bytes: int) -> float:
    """Milliseconds that every plan takes, at least, whose peak is at most `budget_bytes`; infinite if there is none."""
    covering = Covering(simulator)
    limit = budget_bytes - simulator.profile.static.total
    if limit <= 0:
        return np.inf if int(covering.base.max()) > limit else 0.0
    rows: list[Row] = list(covering.structure)
    positions: set[int] = set()
    n_variables, best = covering.n_fixed, 0.0
    dropped: Floats = np.zeros(covering.n_storages)
    for _ in range(ROUNDS):
        more = _binding(covering.usage(dropped), limit, positions)
        if not more:
            break
        for position in more:
            positions.add(position)
            added, n_variables = covering.capacity(position, limit, n_variables)
            rows += added
        a, b = matrix(rows, n_variables)
        cost = np.concatenate((covering.cost, np.zeros(n_variables - covering.n_fixed)))
        upper = np.concatenate((covering.upper, np.ones(n_variables - covering.n_fixed)))
        answer = linprog(cost, A_ub=a, b_ub=b, bounds=np.column_stack((np.zeros(n_variables), upper)), method="highs")
        if answer.status == 2:
            return np.inf
        if answer.status != 0:
            break
        best = max(best, float(answer.fun) - SLACK * float(covering.cost.sum()))
        dropped = np.clip(answer.x[: covering.n_storages], 0.0, 1.0)
    return best


def _binding(usage: Floats, limit: int, known: set[int]) -> list[int]:
    """Positions over the limit that are not `known`: each the worst around it, the worst of all first."""
    over = usage - limit * (1 + 1e-7)
    over[sorted(known)] = 0
    found: list[int] = []
    reach = max(1, len(usage) // 50)
    while len(found) < AT_ONCE and over.max() > 0:
        worst = int(over.argmax())
        found.append(worst)
        over[max(0, worst - reach) : worst + reach + 1] = 0
    return found
