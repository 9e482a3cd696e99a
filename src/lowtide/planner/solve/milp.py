"""Assemble the rows of a covering problem and solve them with HiGHS, with decisions as shares (0 to 1) or as integers.

HiGHS (Huangfu and Hall 2018, doi 10.1007/s12532-017-0130-5) is stopped by the number of branch-and-bound nodes, not by
a clock unless one is given: the same program has the same solution each time. Before HiGHS branches, decided variables
are removed: if the reduced cost of a variable at its bound is more than `slack`, a solution with the variable elsewhere
costs at least `slack` more than the relaxation (Dantzig, Fulkerson and Johnson 1954, doi 10.1287/opre.2.4.393). A
solution found with little slack is good, takes a tenth of the time, and tells the slack that the best solution needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lowtide.planner.simulate.profile_tables import Flags, Ints
from lowtide.planner.solve.linear_program import CoveringProblem
from lowtide.planner.solve.program_variables import Floats, Row
from lowtide.utils.stderr_filter import without_noise

AT_ONCE = 4
"""Largest number of positions whose rows are added to the relaxation from one round to the next."""
ROUNDS = 8
"""Largest number of relaxations that are solved until no position is over the limit."""
NODES = 10
"""Largest number of nodes of the search tree that are visited."""
NEAR_ENOUGH = 2e-3
"""Relative gap at which the search for decisions ends, if not before."""
FREE = 1e-9
"""Cost in milliseconds below which a relaxation counts as free."""
NOISE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution"
"""Line that HiGHS 1.8 to 1.12 prints when it repairs a solution (https://github.com/jump-dev/HiGHS.jl/issues/312)."""
CLOSE = 5e-3
"""Relative excess over the relaxation's cost up to which decisions count as the cheapest."""
CORES = ((1e-4, CLOSE), (3e-3, 0.03), (0.03, np.inf), (np.inf, np.inf))
"""Cores of the search, the smallest first: a share of the relaxation's cost, within which decisions are searched for,
and a gap to the relaxation up to which no larger core is searched. The third core takes ten times as long as the first.
"""
OPEN = 1e-6
"""Least distance from 0 and from 1 of the share of an open decision."""
FEW_OPEN, MANY_OPEN = 8, 16
"""Numbers of open decisions above which only the smallest core is searched, and above which no bound is raised: time
grows much faster with the number of open decisions than with the number of all decisions.
"""
FAR = 0.06
"""Gap between a known cost and the relaxation up to which the bound is raised despite MANY_OPEN: if the gap is larger,
a slightly higher bound is of no use.
"""
SMALL = 300
"""Number of variables up to which a bound is always raised: that takes no time."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A solution of HiGHS. `variables` has the covering problem's fixed variables; None if no solution was found."""

    variables: Floats | None
    cost: float
    """Cost of the solution; infinite if none was found."""
    bound: float
    """Lower bound on the cost of any solution of the program; infinite if the program has no solution."""
    usage: dict[int, float]
    """Bytes at the positions of the program, corrections included."""


NO_SOLUTION = Solution(None, np.inf, 0.0, {})
IMPOSSIBLE = Solution(None, np.inf, np.inf, {})


@dataclass(slots=True)
class MilpProblem:
    """A covering problem for one limit, with the positions that matter for this limit and further rows to satisfy."""

    covering: CoveringProblem
    limit: int
    cost: Floats
    """Cost of each fixed variable."""
    positions: list[int] = field(default_factory=list)
    omitted_bytes: dict[int, float] = field(default_factory=dict)
    """Bytes by position that the covering problem omits and that a simulation found there."""
    rows: list[Row] = field(default_factory=list)
    """Rows in the fixed variables, beyond those of the covering problem."""
    until: float | None = None
    """End of the search for decisions, by `time.monotonic()`."""
    _last: tuple[object, _Relaxation] | None = None

    def add(self, usage: Floats) -> bool:
        """Add to the program the positions at which `usage` is most over the limit; return True if any is new."""
        new = find_worst_positions(usage, self.limit, self.positions)
        self.positions += new
        return bool(new)

    def subtract_omitted(self, simulated: Ints, solved: Mapping[int, float]) -> None:
        """Add to `omitted_bytes` the excess of `simulated` memory over `solved`, the memory by the program's rows.

        Only the program's positions at which simulated memory is over the limit count.
        """
        for position in self.positions:
            if (over := float(simulated[position])) > self.limit:
                more = self.omitted_bytes.get(position, 0.0) + over - solved[position]
                self.omitted_bytes[position] = max(more, 0.0)

    def solve_relaxation(self) -> Solution:
        """Return the cheapest solution with decisions as shares (0 to 1).

        Positions over the limit are added to the program until a solution has none, at most ROUNDS times.
        """
        covering = self.covering
        if not self.positions:
            self.add(covering.memory.usage(np.zeros(covering.variables.n_storages)))
        best = Solution(np.zeros(covering.variables.n_fixed), 0.0, 0.0, {})
        for _ in range(ROUNDS if self.positions else 0):
            answer = self._relaxation().answer
            if answer.variables is None:
                return answer if answer.bound == np.inf else best
            best = answer
            if not self.add(covering.memory.usage(answer.variables[: covering.variables.n_storages])):
                break
        return best

    def solve_decisions(self, *, accept_any: bool = False) -> Solution:
        """Return integer decisions within the limit at all `positions`: nearly the cheapest, or with `accept_any` the
        first ones found.

        Larger and larger parts of the decisions (CORES) are searched, until a larger part would not be worth its time.
        """
        relaxed = self._relaxation()
        least = relaxed.answer.bound
        if relaxed.answer.variables is None:
            return relaxed.answer
        best, tried, known = NO_SOLUTION, 0.0, None
        for share, enough in CORES:
            slack = min(share * max(least, FREE), best.cost - least)
            if slack <= tried:
                break
            settled, tried = relaxed.fixed_variables(slack), slack
            if known is None or not np.array_equal(settled, known):  # without such rows the solution would be the same
                best = min(best, relaxed.rows.solve_integers(settled), key=lambda answer: answer.cost)
            known = settled
            has_decisions = best.variables is not None
            if best.cost <= (1 + enough) * least or (has_decisions and (accept_any or relaxed.n_open > FEW_OPEN)):
                break
        return best

    def tighten_bound(self, known: float) -> float:
        """Return a lower bound on the cost of decisions within the limit at all `positions`.

        `known` is the cost of decisions that were found.

        The relaxation's bound is returned if it is close to `known`, or if the relaxation leaves too many decisions
        between 0 and 1. Otherwise branch and bound improves it.
        """
        relaxed = self._relaxation()
        least = relaxed.answer.bound
        slack = known - least
        if relaxed.answer.variables is None or slack <= CLOSE * least:
            return least
        is_small = self.covering.variables.n_fixed <= SMALL
        if relaxed.n_open > (FEW_OPEN if slack > FAR * least else MANY_OPEN) and not is_small:
            return least
        return max(least, min(relaxed.rows.solve_integers(relaxed.fixed_variables(slack)).bound, known))

    def _relaxation(self) -> _Relaxation:
        """Return the solved relaxation of the program as it is now, solved again only if the program has changed."""
        now = self.positions.copy(), self.rows.copy(), self.omitted_bytes.copy()
        if self._last is None or self._last[0] != now:
            self._last = now, _MatrixForm(self).solve_relaxation()
        return self._last[1]


def is_over(until: float | None) -> bool:
    """Return True if the time `until` has passed, by `time.monotonic()`; None means no limit."""
    return until is not None and time.monotonic() >= until


@dataclass(frozen=True, slots=True, eq=False)
class _Relaxation:
    """Solution of a program with decisions as shares (0 to 1).

    For each variable it has the least extra cost of solutions in which the variable is not 0, and of those in which it
    is not 1.
    """

    rows: _MatrixForm
    answer: Solution
    cost_above_zero: Floats
    cost_below_one: Floats

    @property
    def n_open(self) -> int:
        """Return the number of decisions that the relaxation leaves between 0 and 1."""
        assert self.answer.variables is not None
        decisions = self.answer.variables[: self.rows.covering.variables.n_decisions]
        return int(np.count_nonzero(np.abs(decisions - 0.5) < 0.5 - OPEN))

    def fixed_variables(self, slack: float) -> tuple[Flags, Flags]:
        """Flag the decisions that are 0, and those that are 1, in all solutions that cost at most `slack` more than
        this one.
        """
        fixed = np.arange(self.rows.n) < self.rows.covering.variables.n_decisions
        return fixed & (self.cost_above_zero > slack), fixed & (self.cost_below_one > slack)


class _MatrixForm:
    """A program as A @ variables <= b. SciPy is imported only here, so that reading records does not wait for it."""

    def __init__(self, problem: MilpProblem) -> None:
        from scipy.sparse import csr_array

        self.problem = problem
        covering = self.covering = problem.covering
        rows, variables, values, most = [], [], [], []
        n_rows, n_own, n_fixed = 0, 0, covering.variables.n_fixed
        self.capacity: list[int] = []
        """Rows of the memory capacity, one for each position."""
        for part in (covering.structure, *map(covering.at, problem.positions)):
            rows.append(part.row + n_rows)
            variables.append(np.where(part.variable >= n_fixed, part.variable + n_own, part.variable))
            values.append(part.value)
            most.append(part.most)
            n_rows, n_own = n_rows + len(part.most), n_own + part.n_own
            self.capacity.append(n_rows - 1)
        del self.capacity[0]
        for row, limit in problem.rows:
            rows.append(np.full(len(row), n_rows))
            variables.append(np.array(list(row), np.int64))
            values.append(np.array(list(row.values()), np.float64))
            most.append(np.array([limit]))
            n_rows += 1
        self.n = n_fixed + n_own
        # 32-bit integers: SciPy 1.11 accepts no others.
        places = tuple(np.concatenate(columns).astype(np.int32) for columns in (rows, variables))
        entries = np.concatenate(values), places
        self.matrix = csr_array(entries, shape=(n_rows, self.n))
        self.most: Floats = np.concatenate(most)
        room = [problem.limit - problem.omitted_bytes.get(position, 0.0) for position in problem.positions]
        self.most[self.capacity] += np.array(room, np.float64) / covering.memory.plain
        self.cost = np.concatenate([problem.cost, np.zeros(n_own)])
        self.upper = np.concatenate([covering.costs.upper, np.ones(n_own)])

    def solve_relaxation(self) -> _Relaxation:
        """Return the cheapest solution with decisions as shares (0 to 1), with the reduced costs of each variable.

        Reduced costs are lower bounds on the extra cost of a solution with the variable 1 above 0, or 1 below its upper
        bound.
        """
        from scipy.optimize import linprog

        bounds = np.column_stack((np.zeros(self.n), self.upper))
        solution = linprog(self.cost, A_ub=self.matrix, b_ub=self.most, bounds=bounds, method="highs")
        if solution.status != 0:
            none = np.zeros(self.n)
            return _Relaxation(self, IMPOSSIBLE if solution.status == 2 else NO_SOLUTION, none, none)
        return _Relaxation(
            self, self._answer(solution.x, float(solution.fun)), solution.lower.marginals, -solution.upper.marginals
        )

    def solve_integers(self, settled: tuple[Flags, Flags]) -> Solution:
        """Return integer decisions of nearly the least cost. `settled` flags decisions fixed at 0, and those fixed at
        1.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        lower, upper = np.where(settled[1], self.upper, 0.0), np.where(settled[0], 0.0, self.upper)
        options: dict[str, float] = {"node_limit": NODES, "mip_rel_gap": NEAR_ENOUGH}
        if self.problem.until is not None:
            options["time_limit"] = max(0.0, self.problem.until - time.monotonic())
        with without_noise(1, NOISE):
            solution = milp(
                self.cost,
                integrality=np.arange(self.n) < self.covering.variables.n_decisions,
                bounds=Bounds(lower, upper),
                constraints=LinearConstraint(self.matrix, -np.inf, self.most),
                options=options,
            )
        if solution.x is None:
            return IMPOSSIBLE if solution.status == 2 else NO_SOLUTION
        return self._answer(solution.x, float(solution.mip_dual_bound))

    def _answer(self, variables: Floats, bound: float) -> Solution:
        slack = (self.matrix @ variables - self.most)[self.capacity]
        usage = slack * self.covering.memory.plain + self.problem.limit
        at = dict(zip(self.problem.positions, usage.tolist(), strict=True))
        return Solution(variables[: self.covering.variables.n_fixed], float(self.cost @ variables), max(0.0, bound), at)


def find_worst_positions(usage: Floats, limit: int, known: list[int]) -> list[int]:
    """Return positions over the limit that are not `known`, the worst first, at most one in each neighbourhood."""
    over = np.array(usage, np.float64) - limit * (1 + 1e-7)
    over[known] = 0
    positions: list[int] = []
    reach = max(1, len(usage) // 50)
    while len(positions) < AT_ONCE and over.max() > 0:
        worst = int(over.argmax())
        positions.append(worst)
        over[max(0, worst - reach) : worst + reach + 1] = 0
    return positions
