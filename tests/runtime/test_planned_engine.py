"""Engines with plans for several sizes: the plan that each call gets, and the comparisons of sizes behind it."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.planner.records import Decided, Plan
from lowtide.runtime.call_shapes import Shapes, elements, list_shapes, no_larger, parse_shapes, within
from lowtide.runtime.planned_engine import (
    PlannedEngine,
    estimate_fitting_elements,
    find_most_elements,
    find_shared_implementations,
)
from runtime.plans import installed
from runtime.test_guards import PLAN


def for_rows(n_rows: int, **fields: Any) -> Plan:
    return replace(PLAN, input_shapes=(f"[{n_rows}, 6] float32",), **fields)


class Chosen(PlannedEngine):
    """Records the number of the plan that each call gets."""

    def choose(self, *call: Any) -> int:
        self.plans = [*getattr(self, "plans", []), super().choose(*call)]
        return self.plans[-1]


def chosen(*plans: Plan, rows: list[int], save_most: int | None = None) -> list[int]:
    model = nn.Sequential(nn.Linear(6, 6))
    engine = Chosen(model, *plans)
    if save_most is not None:
        assert engine.save_most((torch.ones(save_most, 6),), {})
        assert not engine.save_most((torch.ones(save_most, 6),), {})
    with installed(engine):
        for n_rows in rows:
            model(torch.ones(n_rows, 6))
    return engine.plans


FALLBACK = Decided(recompute={}, replay=("0#0",))


def test_each_size_has_the_smallest_plan_that_it_fits() -> None:
    assert chosen(for_rows(2), for_rows(4), rows=[1, 2, 3, 4, 5]) == [0, 0, 1, 1, 1]
    assert chosen(for_rows(2), for_rows(4, fallback=FALLBACK), rows=[1, 2, 3, 4, 5]) == [0, 0, 1, 1, 2]
    assert chosen(for_rows(4), rows=[5]) == [0]


def test_the_last_call_is_known_to_have_had_the_smallest_peak() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    engine = PlannedEngine(model, for_rows(2), for_rows(4, fallback=FALLBACK))
    had_smallest = list[bool]()
    with installed(engine):
        for n_rows in (1, 5, 3):
            model(torch.ones(n_rows, 6))
            had_smallest.append(engine.saves_most)
    assert had_smallest == [False, True, False]


def test_from_a_size_that_ran_out_of_memory_the_smallest_peak_is_used() -> None:
    plans = for_rows(2), for_rows(4, fallback=FALLBACK)
    assert chosen(*plans, rows=[1, 2, 3, 4], save_most=3) == [0, 0, 2, 2]


@pytest.mark.parametrize(("plans", "rows"), [((for_rows(4),), 3), ((for_rows(2), for_rows(4, fallback=FALLBACK)), 5)])
def test_nothing_is_left_to_save_where_there_is_no_other_plan_or_it_is_in_use(plans: tuple[Plan, ...], rows: int):
    assert not PlannedEngine(nn.Linear(6, 6), *plans).save_most((torch.ones(rows, 6),), {})


def test_calls_of_a_part_are_reported_with_their_arguments() -> None:
    model, parts = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), list[Tensor]()
    engine, x = PlannedEngine(model, PLAN), torch.ones(4, 6)
    engine.of_a_part = lambda args, kwargs, part: parts.extend(args)
    with installed(engine):
        model(x)
        assert parts == []
        model[0](x)
    assert len(parts) == 1
    assert parts[0] is x


def test_the_largest_of_all_rehearsed_calls_counts() -> None:
    assert find_most_elements(replace(PLAN, input_shapes=("[4, 6] float32, [4] int64", "[5, 2] float32"))) == 28
    assert find_most_elements(replace(PLAN, input_shapes=())) == inf


def test_calls_need_no_plan_up_to_the_elements_whose_activations_fit_beside_the_rest() -> None:
    plain = replace(PLAN.plain, peak_bytes=1000, held_bytes=600)
    plan = replace(for_rows(4), plain=plain, budget_bytes=700)
    assert estimate_fitting_elements(plan) == 12  # 300 of 600 bytes, so half of 24 elements
    assert estimate_fitting_elements(replace(plan, budget_for="reserved")) == 0
    assert estimate_fitting_elements(replace(plan, input_shapes=())) == 0
    assert estimate_fitting_elements(replace(plan, plain=replace(plain, held_bytes=0))) == 0
    engine = PlannedEngine(nn.Linear(6, 6), replace(plan, fallback=FALLBACK))
    assert [engine.has_room(0, n_elements) for n_elements in (0, 1, 12, 13)] == [False, True, True, False]
    assert not engine.has_room(1, 1)  # the fallback


def test_an_implementation_is_used_where_all_plans_name_it() -> None:
    named = replace(PLAN, implementations={"NativeBatchNormBackward0": "from statistics", "Odd": "from statistics"})
    other = replace(PLAN, implementations={"NativeBatchNormBackward0": "another"})
    assert find_shared_implementations([]) == {}
    assert find_shared_implementations([named, other]) == find_shared_implementations([named, PLAN]) == {}
    assert "Odd" not in find_shared_implementations([named])


@pytest.mark.parametrize(
    ("one", "other", "is_within", "is_no_larger"),
    [
        (((4, 6),), ((4, 6),), True, True),
        (((3, 7),), ((4, 6),), False, False),
        (((5, 6),), ((4, 6),), False, False),
        (((4, 6), (4,)), ((4, 6), (4,)), True, True),
        (((4, 6), (5,)), ((4, 6), (4,)), False, False),
        (((24,),), ((4, 6),), False, True),  # another form: elements are compared
        (((25,),), ((4, 6),), False, False),
        (((4, 5), (4,)), ((4, 6),), False, True),
    ],
)
def test_calls_are_compared_by_each_dimension_or_by_their_elements(
    one: Shapes, other: Shapes, is_within: bool, is_no_larger: bool
) -> None:
    assert within(one, other) is is_within
    assert no_larger(one, other) is is_no_larger


def test_shapes_are_those_of_all_tensors_but_numbers() -> None:
    x, mask = torch.ones(2, 3), torch.ones(2)
    assert list_shapes((x, torch.tensor(5)), {"mask": mask}) == ((2, 3), (2,))
    assert parse_shapes("[8, 1024] int64, [8] float32") == ((8, 1024), (8,))
    assert elements(((2, 3), (2,))) == 8
    assert elements(()) == 0
