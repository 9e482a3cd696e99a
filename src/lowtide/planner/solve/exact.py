"""Find decisions by branch and bound: solve the covering problem in integers until the simulator confirms the result.

HiGHS finds the cheapest decisions for the rows of `linear_program.py`. These rows omit memory that depends on all other
decisions (scratch memory, values recomputed early for other recomputes), so the decisions are simulated. At positions
over the limit the omitted memory is subtracted from the capacity, and the program is solved again. Decisions that are
still a little over the limit are repaired by greedy moves.

Optimal for the rows; the omitted memory is the only gap between a choice and the bound (`lower_bound.py`).
Deterministic: stopped by numbers of nodes and rounds. Not yet: omitted memory is charged to a position regardless of
the other decisions there, which is too careful at the smallest budgets.
"""

from __future__ import annotations

import numpy as np

from lowtide.planner.simulate.assignment import DecisionVector
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.greedy import GreedySearch
from lowtide.planner.solve.linear_program import get_covering
from lowtide.planner.solve.milp import MilpProblem, is_over
from lowtide.planner.solve.moves import Moves
from lowtide.planner.solve.pareto_pool import Candidate, CostRange
from lowtide.planner.solve.program_variables import Floats, Row

Bytes = dict[int, float]
"""Bytes by position."""
ROUNDS = 3
"""Largest number of integer programs that are solved for one limit."""
ROUGH = 0.1
"""Largest share of the limit that the rows may omit; if more is omitted, their solutions are no guide to choices that
fit.
"""
TIGHT = 0.97
"""Share of the limit above which a position is part of the program for the next limit from its first round on."""
TIE = 0.01
"""Relative accuracy of measured times: FLOPs decide between times that are closer."""


class BranchAndBound:
    """Solver of one profile's covering problem, for any limit on the peak."""

    def __init__(self, simulator: Simulator, moves: Moves) -> None:
        index = simulator.index
        self.simulator = simulator
        self.moves = moves
        covering = self.covering = get_covering(simulator)
        variables = covering.variables
        ms, flops = float(covering.costs.ms.sum()), float(covering.costs.flops.sum())
        self.tie = TIE * ms / flops if flops else 0.0
        self.cost: Floats = covering.costs.ms + self.tie * covering.costs.flops
        self._call_ids = [(v, int(index.calls.id[call])) for call, v in variables.runs.items()]
        self._recompute_variables = [
            [variables.n_storages + storage for storage in sorted(g.storages)] for g in moves.groups
        ]
        """For each group the variables, one per storage, that are 1 if the group is recomputed."""
        self._advance_ids = [(v, int(index.calls.id[c])) for c, v in variables.advances.items()]
        calls = [
            [variables.runs[call] for call in calls if call in variables.runs] for calls in index.reruns.replayed_by_id
        ]
        calls += [[variables.advances[call] for call in calls] for calls in index.reruns.advanced_by_id]
        self._offload_variables = [
            [variables.offloads[storage] for storage in sorted(g.storages)] for g in moves.offloads
        ]
        """For each group the variables, one per storage, that are 1 if the group is offloaded."""
        self._equalities: list[Row] = []
        """Rows that treat all storages of a group alike, and a module call alike in every call of the model."""
        for first, *others in filter(None, [*self._recompute_variables, *self._offload_variables, *calls]):
            for other in others:
                self._equalities += [({first: 1.0, other: -1.0}, 0.0), ({other: 1.0, first: -1.0}, 0.0)]

    def search(
        self, search: GreedySearch, limit: int, span: CostRange, omitted_bytes: Bytes, until: float | None = None
    ) -> tuple[float, Bytes]:
        """Add choices that fit `limit`, at costs within `span`, to the pool of `search`.

        `omitted_bytes` has the positions that mattered for a similar limit, and the memory that the program's rows omit
        there. Returns a lower bound on the cost, FLOPs included, of any choice that fits (infinite if none fits, 0 if
        too much memory is omitted to tell), and `omitted_bytes` for this limit. The bound holds for choices with at
        least as much omitted memory. Ends early at `until`.
        """
        if is_rough(omitted_bytes, limit):
            return 0.0, omitted_bytes
        problem = MilpProblem(
            self.covering, limit, self.cost, list(omitted_bytes), rows=list(self._equalities), until=until
        )
        problem.omitted_bytes = dict(omitted_bytes)
        relaxed = problem.solve_relaxation()
        if relaxed.variables is None and problem.omitted_bytes:
            problem.omitted_bytes = {}
            relaxed = problem.solve_relaxation()
        if relaxed.variables is None:
            return relaxed.bound, omitted_bytes
        choice, fits, omitted_bytes = self._correct_rounds(problem, search, span, omitted_bytes)
        if is_over(until):
            return relaxed.bound, omitted_bytes
        if not fits:
            choice = search.reduce(choice, limit)
        if search.fits(choice, limit) and (not fits or any(problem.omitted_bytes.values())):
            search.prune(choice, limit)  # the capacity may have been lowered by too much
        return relaxed.bound, omitted_bytes

    def _correct_rounds(
        self, problem: MilpProblem, search: GreedySearch, span: CostRange, omitted_bytes: Bytes
    ) -> tuple[DecisionVector, bool, Bytes]:
        """Solve `problem`, simulate the decisions and correct `problem` by the result, until decisions fit at a cost
        within `span`.

        Returns the last decisions, True if they fit, and the omitted memory at the positions that mattered.
        """
        limit = problem.limit
        choice, fits = search.simulator.keep_everything(), False
        for _ in range(ROUNDS):
            if is_over(problem.until):
                break
            # A capacity with omitted memory subtracted is a guess: accept any decisions that are found quickly.
            answer = problem.solve_decisions(accept_any=any(problem.omitted_bytes.values()))
            if answer.variables is None and problem.omitted_bytes and not fits:
                problem.omitted_bytes = {}
                answer = problem.solve_decisions()
            if answer.variables is None:
                break
            choice = self.choice(answer.variables)
            sweep = search.sweep(choice)
            omitted_bytes = {
                position: problem.omitted_bytes.get(position, 0.0)
                for position, usage in answer.usage.items()
                if usage > TIGHT * limit
            }
            fits = sweep.peak <= limit
            if fits and span.contains((sweep.extra_ms, sweep.extra_flops)):
                break
            if fits:
                problem.rows += self._within(span)
            problem.subtract_omitted(sweep.usage, answer.usage)
            if is_rough(problem.omitted_bytes, limit):
                omitted_bytes |= problem.omitted_bytes
                break
            problem.add(sweep.usage.astype(np.float64))
        return choice, fits, omitted_bytes

    def compute_cost(self, candidate: Candidate) -> float:
        """Return a simulated choice's extra time plus a small weight for its FLOPs, as the solver minimizes both."""
        return candidate.extra_ms + self.tie * candidate.extra_flops

    def choice(self, variables: Floats) -> DecisionVector:
        """Return the decisions in a solution of the program: those whose variable in `variables` is above 0.5."""
        choice = self.simulator.keep_everything()
        for group, of_storages in zip(self.moves.groups, self._recompute_variables, strict=True):
            if variables[of_storages].max() > 0.5:
                choice.recompute[group.addresses] = True
        for group, of_storages in zip(self.moves.offloads, self._offload_variables, strict=True):
            if variables[of_storages].max() > 0.5:
                choice.offload[group.addresses] = True
        for variable, id_ in self._call_ids:
            if variables[variable] > 0.5:
                choice.replay[id_] = True
        for variable, id_ in self._advance_ids:
            if variables[variable] > 0.5:
                choice.advance[id_] = True
        return choice

    def _within(self, span: CostRange) -> list[Row]:
        """Return rows of the program that keep the time within `span`, scaled by the largest possible time."""
        ms = self.covering.costs.ms
        total = float(ms.sum())
        if not total:
            return []
        row = {variable: float(ms[variable]) / total for variable in ms.nonzero()[0].tolist()}
        less = {variable: -share for variable, share in row.items()}
        return [(row, span.most.extra_ms / total), (less, -span.least.extra_ms / total)]


def is_rough(omitted_bytes: Bytes, limit: int) -> bool:
    """Return True if the program's rows omit so much memory at some position that solving them is useless."""
    return max(omitted_bytes.values(), default=0.0) > ROUGH * limit
