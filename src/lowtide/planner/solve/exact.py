"""Find decisions by branch and bound: the covering problem in integers, until the simulator agrees.

HiGHS finds the cheapest decisions for the rows of `linear_program.py`. Those rows leave out memory that depends on all
other decisions (scratch memory, copies made for others), so the decisions are simulated; at positions over the limit
the omitted memory is subtracted from the capacity and the program is solved again. Decisions that are still a little
over the limit are mended by greedy moves.

Optimal for the rows; the omitted memory is the only gap between a choice and the bound (`lower_bound.py`).
Deterministic: stopped by numbers of nodes and rounds. Not yet: omitted memory is charged to a position regardless of
the other decisions there, which is too careful at the smallest budgets.
"""

from __future__ import annotations

import numpy as np

from lowtide.planner.simulate.assignment import DecisionVector
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.greedy import Search
from lowtide.planner.solve.linear_program import Floats, Row, covering_of
from lowtide.planner.solve.milp import Programme, is_over
from lowtide.planner.solve.moves import Moves
from lowtide.planner.solve.pareto_pool import Candidate, CostRange

Bytes = dict[int, float]
"""Bytes by position."""
ROUNDS = 3
"""Integer programs that are solved for one limit."""
ROUGH = 0.1
"""Share of the limit: if the rows leave out more, their solutions are no guide to choices that fit."""
TIGHT = 0.97
"""Share of the limit from which on a position is included from the start for the next limit."""
TIE = 0.01
"""Relative accuracy of measured times: FLOPs decide between times that are closer."""


class Exact:
    """The covering problem of one profile, to be solved for any limit."""

    def __init__(self, simulator: Simulator, moves: Moves) -> None:
        index = simulator.index
        self.simulator = simulator
        self.moves = moves
        covering = self.covering = covering_of(simulator)
        ms, flops = float(covering.ms.sum()), float(covering.flops.sum())
        self.tie = TIE * ms / flops if flops else 0.0
        self.cost: Floats = covering.ms + self.tie * covering.flops
        self._call_ids = [(v, index.id_index[simulator.profile.calls[call].id]) for call, v in covering.runs.items()]
        self._groups = [[covering.n_storages + storage for storage in sorted(g.storages)] for g in moves.groups]
        """Variables that say that a group is recomputed."""
        self._advance_ids = [(v, index.id_index[simulator.profile.calls[c].id]) for c, v in covering.advances.items()]
        calls = [[covering.runs[call] for call in calls if call in covering.runs] for calls in index.calls_of_id]
        calls += [[covering.advances[call] for call in calls] for calls in index.advances_of_id]
        self._trips = [[covering.offloads[storage] for storage in sorted(g.storages)] for g in moves.offloads]
        """Variables that say that a group is offloaded."""
        self._together: list[Row] = []
        """Rows that keep groups whole, and make a call run again in every call of the model."""
        for first, *others in filter(None, [*self._groups, *self._trips, *calls]):
            for other in others:
                self._together += [({first: 1.0, other: -1.0}, 0.0), ({other: 1.0, first: -1.0}, 0.0)]

    def search(
        self, search: Search, limit: int, span: CostRange, left_out: Bytes, until: float | None = None
    ) -> tuple[float, Bytes]:
        """Add choices that fit `limit`, at costs within `span`, to the pool of `search`.

        `left_out` has the positions that mattered for a limit like this one, and the memory that the rows left out
        there. Returns a lower bound on the cost of any choice that fits, FLOPs included, if as much is left out then:
        infinite if none fits, 0 if too much is left out to tell; and `left_out` for this limit. Ends early at `until`.
        """
        if is_rough(left_out, limit):
            return 0.0, left_out
        programme = Programme(self.covering, limit, self.cost, list(left_out), rows=list(self._together), until=until)
        programme.more = dict(left_out)
        relaxed = programme.relaxed()
        if relaxed.variables is None and programme.more:
            programme.more = {}
            relaxed = programme.relaxed()
        if relaxed.variables is None:
            return relaxed.bound, left_out
        choice, fits = search.simulator.nothing(), False
        for _ in range(ROUNDS):
            if is_over(until):
                break
            # Capacities with omitted memory subtracted are guesses: then accept any decisions that are found quickly.
            answer = programme.decisions(any_will_do=any(programme.more.values()))
            if answer.variables is None and programme.more and not fits:
                programme.more = {}
                answer = programme.decisions()
            if answer.variables is None:
                break
            choice = self.choice(answer.variables)
            sweep = search.sweep(choice)
            left_out = {
                position: programme.more.get(position, 0.0)
                for position, usage in answer.usage.items()
                if usage > TIGHT * limit
            }
            fits = sweep.peak <= limit
            if fits and span.holds((sweep.extra_ms, sweep.extra_flops)):
                break
            if fits:
                programme.rows += self._within(span)
            for position in programme.positions:
                if (over := float(sweep.usage[position])) > limit:
                    more = programme.more.get(position, 0.0) + over - answer.usage[position]
                    programme.more[position] = max(more, 0.0)
            if is_rough(programme.more, limit):
                left_out |= programme.more
                break
            programme.add(sweep.usage.astype(np.float64))
        if is_over(until):
            return relaxed.bound, left_out
        if not fits:
            choice = search.reduced(choice, limit)
        if search.fits(choice, limit) and (not fits or any(programme.more.values())):
            search.pruned(choice, limit)  # more than needed may have been subtracted from the capacity
        return relaxed.bound, left_out

    def cost_of(self, found: Candidate) -> float:
        """Return the objective of a simulated choice."""
        return found.extra_ms + self.tie * found.extra_flops

    def choice(self, variables: Floats) -> DecisionVector:
        """Return the decisions that the variables stand for."""
        choice = self.simulator.nothing()
        for group, of_storages in zip(self.moves.groups, self._groups, strict=True):
            if variables[of_storages].max() > 0.5:
                choice.recompute[group.addresses] = True
        for group, of_storages in zip(self.moves.offloads, self._trips, strict=True):
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
        """Return rows that keep times within `span`, scaled by the largest possible time."""
        ms = self.covering.ms
        total = float(ms.sum())
        if not total:
            return []
        row = {variable: float(ms[variable]) / total for variable in ms.nonzero()[0].tolist()}
        less = {variable: -share for variable, share in row.items()}
        return [(row, span.most.extra_ms / total), (less, -span.least.extra_ms / total)]


def is_rough(left_out: Bytes, limit: int) -> bool:
    """Return True if the rows leave out so much that solving them is useless."""
    return max(left_out.values(), default=0.0) > ROUGH * limit
