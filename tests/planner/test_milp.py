"""Parts of the integer program: the positions that are added to it, and what it costs to move a decision."""

from types import SimpleNamespace

import numpy as np
import pytest

from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.linear_program import get_covering
from lowtide.planner.solve.milp import AT_ONCE, MilpProblem, find_worst_positions
from planner.profiles import chain


def test_the_worst_positions_are_added_each_with_room_around_it() -> None:
    usage = np.zeros(200)
    usage[[20, 24, 25, 100, 104, 105, 160, 199]] = 30, 50, 20, 40, 40, 35, 11, 60
    assert find_worst_positions(usage, 10, []) == [199, 24, 100, 105]  # 1/50 of all around each is left out
    assert len(find_worst_positions(usage, 10, [])) == AT_ONCE
    assert find_worst_positions(usage, 10, [199, 100]) == [24, 104, 160]
    assert find_worst_positions(usage, 60, []) == []
    assert find_worst_positions(usage[:25], 29, []) == [24, 20]


def test_only_new_positions_are_added() -> None:
    covering = get_covering(Simulator(chain(3)))
    problem = MilpProblem(covering, 60, covering.costs.ms)
    usage = covering.memory.usage(np.zeros(covering.variables.n_storages))
    assert problem.add(usage)
    assert problem.positions == find_worst_positions(usage, 60, [])
    while problem.add(usage):
        pass
    assert len(set(problem.positions)) == len(problem.positions) == int((usage > 60).sum())


def test_a_relaxation_fits_at_every_position_and_costs_no_more_than_decisions() -> None:
    covering = get_covering(Simulator(chain(3)))
    problem = MilpProblem(covering, 250, covering.costs.ms)
    relaxed = problem.solve_relaxation()
    decided = problem.solve_decisions()
    assert relaxed.variables is not None
    assert decided.variables is not None
    assert covering.memory.usage(relaxed.variables[: covering.variables.n_storages]).max() <= 250 * (1 + 1e-6)
    assert 0 < relaxed.bound <= decided.cost
    assert max(decided.usage.values()) <= 250 * (1 + 1e-6)
    assert set(np.unique(decided.variables[: covering.variables.n_decisions].round(6))) <= {0.0, 1.0}
    assert relaxed.bound <= problem.tighten_bound(decided.cost) <= decided.cost
    assert problem.tighten_bound(1.004 * relaxed.bound) == relaxed.bound  # too close to be worth the time


def test_a_relaxation_is_of_the_positions_and_rows_that_the_problem_has_now() -> None:
    """Also where they are others than before, and as many."""
    covering = get_covering(Simulator(chain(3)))
    usage = covering.memory.usage(np.zeros(covering.variables.n_storages))
    problem = MilpProblem(covering, 250, covering.costs.ms)
    costs = []
    for position, most in ((int(usage.argmax()), 1.0), (int(usage.argmin()), 1.0), (int(usage.argmin()), -1.0)):
        problem.positions, problem.rows = [position], [({0: 1.0}, most)]
        costs.append(problem.solve_decisions().cost)
        new = MilpProblem(covering, 250, covering.costs.ms, [position], rows=[({0: 1.0}, most)])
        assert costs[-1] == new.solve_decisions().cost
    assert len(set(costs)) == 3


@pytest.mark.parametrize(("known", "n_open", "bound"), [(10.5, 16, 10.2), (10.5, 17, 10), (11, 8, 10.2), (11, 9, 10)])
def test_a_bound_near_a_known_cost_is_worth_more_open_decisions(known: float, n_open: int, bound: float) -> None:
    """The relaxation costs 10, and whole decisions 10.2 at least."""
    rows = SimpleNamespace(solve_integers=lambda fixed: SimpleNamespace(bound=10.2))
    answer = SimpleNamespace(bound=10.0, variables=np.zeros(1))
    relaxed = SimpleNamespace(answer=answer, n_open=n_open, rows=rows, fixed_variables=lambda slack: None)
    covering = SimpleNamespace(variables=SimpleNamespace(n_fixed=10**6))
    problem = SimpleNamespace(_relaxation=lambda: relaxed, covering=covering)
    assert MilpProblem.tighten_bound(problem, known) == bound  # type: ignore[arg-type]
