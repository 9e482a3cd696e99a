"""Monitors of a plan in force: each warns once, of what the plan is not for, and of nothing else."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

from lowtide.planner.records import Decided, Fingerprint, Plan, Prediction
from lowtide.runtime.engine import Engine
from lowtide.runtime.guards import (
    LOOKS,
    STATE_LOOKS,
    UNSEEN,
    PlanGuard,
    remove_expired,
    watch_bypass,
    watch_state_growth,
)
from runtime.plans import installed

PREDICTED = Prediction(peak_bytes=600, peak_position=0, held_bytes=0, extra_ms=1, extra_flops=0, parts={"optimizer": 0})
PLAN = Plan(
    fingerprint=Fingerprint(torch="", model="", batch="", device="cpu"),
    budget_bytes=700,
    recompute={},
    replay=(),
    predicted=PREDICTED,
    plain=PREDICTED,
    step_ms=1,
    input_shapes=("[4, 6] float32",),
)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def guarded(model: nn.Module, outgrown: Callable[[str], bool] = lambda what: False, plan: Plan = PLAN) -> list[str]:
    """Install a guard that lives as long as the model; return its warnings."""
    said: list[str] = []
    model.guard = PlanGuard(model, plan, said.append, said, outgrown)  # type: ignore[assignment]
    return said


@pytest.mark.parametrize("shape", [(4, 6), (3, 6), (1, 6)])
def test_a_batch_that_is_no_larger_is_no_reason_to_warn(model: nn.Module, shape: tuple[int, ...]) -> None:
    said = guarded(model)
    for _ in range(2):
        model(torch.ones(shape))
    assert said == []


def test_a_larger_batch_is_reported_once(model: nn.Module) -> None:
    said = guarded(model)
    model.eval()
    model(torch.ones(9, 6))
    model.train()
    with torch.no_grad():
        model(torch.ones(9, 6))
    assert said == []
    for rows in (5, 9):
        model(torch.ones(rows, 6))
    (message,) = said
    assert message.startswith("Sequential was given [5, 6] float32, and the plan is for [4, 6] float32: ")
    assert "smallest peak" not in message


def test_with_a_fallback_the_warning_names_it(model: nn.Module) -> None:
    said = guarded(model, plan=replace(PLAN, fallback=Decided(recompute={}, replay=("0#0",))))
    model(torch.ones(5, 6))
    assert "though larger batches run under the plan with the smallest peak" in said[0]


def test_a_batch_of_more_elements_may_be_taken_by_another_plan(model: nn.Module) -> None:
    asked: list[str] = []
    said = guarded(model, lambda what: asked.append(what) is None)
    for _ in range(2):
        model(torch.ones(5, 6))
    assert said == []
    assert asked == ["was given [5, 6] float32, and the plan is for [4, 6] float32"]


def test_a_batch_that_is_longer_in_one_dimension_only_is_reported(model: nn.Module) -> None:
    """It has no more elements than the plan is for, so that no plan of its own is made for it."""
    asked: list[str] = []
    said = guarded(model, lambda what: asked.append(what) is None)
    model(torch.ones(2, 2, 6))  # of another form, with as many elements
    model(torch.ones(6, 6)[:4])
    assert said == asked == []
    said = guarded(model, lambda what: asked.append(what) is None, replace(PLAN, input_shapes=("[2, 12] float32",)))
    model(torch.ones(4, 6))
    assert len(said) == 1
    assert asked == []


def test_a_plan_without_shapes_is_for_every_batch(model: nn.Module) -> None:
    said = guarded(model, plan=replace(PLAN, input_shapes=()))
    model(torch.ones(9, 6))
    assert said == []


def test_parameters_that_are_trained_from_now_on_are_counted(model: nn.Module) -> None:
    model[0].requires_grad_(False)
    said = guarded(model)
    model(torch.ones(4, 6))
    model[2].bias.requires_grad_(False)  # fewer need no more memory
    model(torch.ones(4, 6))
    model[2].bias.requires_grad_(True)
    model(torch.ones(4, 6))
    assert said == []
    model[0].bias.requires_grad_(True)
    model(torch.ones(4, 6))
    assert "Sequential has 3 parameters that are trained, and the plan is for 2" in said[0]


def test_parameters_that_are_frozen_for_a_part_of_each_step_are_counted(model: nn.Module) -> None:
    """A critic is frozen while its actor trains, and a plan may be put in force just then."""
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    model[0].requires_grad_(False)
    said = guarded(model)
    model(torch.ones(4, 6))
    model[0].requires_grad_(True)
    model(torch.ones(4, 6))
    assert said == []


def test_another_module_is_named(model: nn.Module) -> None:
    model[1] = nn.Sequential(nn.Tanh(), nn.Identity())
    said = guarded(model)
    model[1][1] = nn.Dropout(0.5)
    model(torch.ones(4, 6))
    assert "has another module at 1.1, where the plan is for the one that it had" in said[0]


class Growing(torch.optim.Optimizer):
    """Gets 400 bytes of state at update number `at`."""

    def __init__(self, parameters: list[Tensor], at: int) -> None:
        super().__init__(parameters, {})
        self.at, self.number = at, 0

    def step(self) -> None:
        self.number += 1
        if self.number == self.at:
            self.state[self.param_groups[0]["params"][0]]["sums"] = torch.zeros(100)


@pytest.mark.parametrize(("at", "n_messages"), [(1, 1), (STATE_LOOKS, 1), (STATE_LOOKS + 1, 0)])
def test_state_that_the_plan_does_not_count_is_reported_after_the_first_updates(
    model: nn.Module, at: int, n_messages: int
) -> None:
    said: list[str] = []
    hook = watch_state_growth(model, PLAN, said.append)
    optimizer, other = Growing([*model.parameters()], at), Growing([nn.Parameter(torch.ones(1))], 1)
    for _ in range(2 * STATE_LOOKS):
        other.step()
        optimizer.step()
    hook.remove()
    assert len(said) == n_messages
    assert all("Growing updates Sequential, whose optimizers have 400 B more state" in message for message in said)


def test_state_that_the_plan_counts_is_no_reason_to_warn(model: nn.Module) -> None:
    said: list[str] = []
    counted = replace(PLAN, plain=replace(PREDICTED, parts={"optimizer": 400}))
    hook = watch_state_growth(model, counted, said.append)
    Growing([*model.parameters()], 1).step()
    hook.remove()
    assert said == []


def train(model: nn.Module, called: nn.Module, n_steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(n_steps):
        called(torch.ones(4, 6)).sum().backward()
        optimizer.step()


def test_steps_past_the_plan_are_reported_once(model: nn.Module) -> None:
    def past_it(x: Tensor) -> Tensor:
        return nn.functional.linear(x, model[0].weight)

    engine, said = Engine(model, {}), list[str]()
    hook = watch_bypass(engine, said.append)
    with installed(engine):
        train(model, past_it, UNSEEN - 1)  # type: ignore[arg-type]
        assert said == []
        train(model, past_it, UNSEEN)  # type: ignore[arg-type]
    hook.remove()
    (message,) = said
    assert message.startswith("Sequential is trained outside the plan")


def test_steps_in_eval_mode_are_reported(model: nn.Module) -> None:
    engine, said = Engine(model.eval(), {}), list[str]()
    hook = watch_bypass(engine, said.append)
    with installed(engine):
        train(model, model, UNSEEN)
    hook.remove()
    assert said == ["Sequential is trained in eval mode, where a plan does nothing: call model.train() first."]


def test_only_the_first_updates_are_observed(model: nn.Module) -> None:
    engine, said = Engine(model, {}), list[str]()
    hook = watch_bypass(engine, said.append)
    with installed(engine):
        train(model, model, LOOKS)
    train(model, model, 2 * UNSEEN)  # the engine is gone
    hook.remove()
    assert said == []


def collect(*_: object) -> None:
    """Collect garbage after an update."""
    gc.collect()


def test_a_model_that_is_freed_while_hooks_run_leaves_them_until_they_can_be_removed() -> None:
    remove_expired()
    before = len(_global_optimizer_post_hooks)
    trained, freed = nn.Linear(2, 1), nn.Linear(2, 1)
    freed.itself = [freed]  # type: ignore[assignment]
    optimizer = torch.optim.SGD(trained.parameters())
    trained(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    collects = register_optimizer_step_post_hook(collect)
    watch_state_growth(freed, PLAN, lambda what: None)
    del freed
    optimizer.step()
    collects.remove()
    remove_expired()
    assert len(_global_optimizer_post_hooks) == before
