"""`fit` as it is called from loops: several arguments, optimizers outside, plans that no variable holds."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal

X, Y = torch.randn(128, 32), torch.randn(128, 32)


class Made:
    """A model, and two optimizers that have a half of it each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())])
        halves = self.model[:4], self.model[4:]
        self.optimizers = [torch.optim.AdamW(half.parameters()) for half in halves]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = (self.model(x) - y).square().mean()
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def fit(self, **settings: Any) -> lowtide.Fitted:
        return lowtide.fit(self.model, self.step, (X, Y), budget="90%", optimizer=self.optimizers, **settings)


def train(made: Made) -> dict[str, Tensor]:
    for _ in range(4):
        made.step(X, Y)
        made.update()
    state: dict[str, Tensor] = made.model.state_dict()
    return state


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_is_unpacked_for_a_step_of_as_many_arguments(kind: Callable[[Any], Any]) -> None:
    made = Made()
    fitted = lowtide.fit(made.model, made.step, kind((X, Y)), budget="90%", optimizer=made.optimizers)
    assert fitted.verdict.within_budget
    assert fitted.verdict.proven
    assert fitted.plan.plain.parts["optimizer"] >= 2 * sum(p.nbytes for p in made.model.parameters())
    assert equal(train(made), train(Made()))


def test_a_step_of_one_argument_gets_the_batch_as_it_is() -> None:
    made = Made()
    fitted = lowtide.fit(made.model, lambda batch: made.step(*batch), (X, Y), budget="90%")
    assert fitted.verdict.proven


@pytest.mark.parametrize("batch", [(X, Y, Y), X, {"x": X, "y": Y}])
def test_a_batch_that_fits_no_argument_list_is_refused(batch: Any) -> None:
    made = Made()
    with pytest.raises(lowtide.RehearsalError, match="step takes 2 arguments, and the batch is a"):
        lowtide.fit(made.model, made.step, batch, budget="90%")


def test_other_stages_unpack_it_too() -> None:
    made = Made()
    profile = lowtide.rehearse(made.model, made.step, (X, Y))
    plan = lowtide.plan(profile, "90%")
    assert lowtide.verify(made.model, made.step, (X, Y), plan).identical
    assert lowtide.timeline(made.model, made.step, (X, Y)).peak_bytes > 0


def test_a_plan_that_no_variable_holds_is_found_and_taken_off() -> None:
    made = Made()
    assert lowtide.fitted(made.model) is None
    text = str(made.fit())
    found = lowtide.fitted(made.model)
    assert isinstance(found, lowtide.Fitted)
    assert str(found) == text
    assert lowtide.fitted(nn.Sequential(made.model)) is found
    lowtide.remove(made.model)
    assert lowtide.fitted(made.model) is None
    assert not any("_compiled_call_impl" in module.__dict__ for module in made.model.modules())
    with pytest.raises(lowtide.LowtideError, match="nothing to remove"):
        lowtide.remove(made.model)


def test_a_plan_is_found_where_it_has_nothing_to_do() -> None:
    made = Made()
    fitted = lowtide.fit(made.model, made.step, (X, Y), budget="1GiB")
    assert lowtide.fitted(made.model) is fitted
    fitted.remove()
    assert lowtide.fitted(made.model) is None


def test_an_applied_plan_is_found() -> None:
    made = Made()
    plan = lowtide.plan(lowtide.rehearse(made.model, made.step, (X, Y)), "90%")
    applied = lowtide.apply(made.model, plan)
    assert lowtide.fitted(made.model) is applied


def test_a_plan_for_compiled_functions_that_call_the_model_is_found_and_holds_nothing() -> None:
    made = Made()
    plan = replace(lowtide.plan(lowtide.rehearse(made.model, made.step, (X, Y)), "100%"), graphs=("a hash",))
    applied = lowtide.apply(made.model, plan)
    assert "_compiled_call_impl" not in vars(made.model)  # calls are traced, and nothing is in front of them
    assert lowtide.fitted(made.model) is applied
    assert lowtide.fitted(nn.Sequential(made.model)) is applied
    with pytest.raises(lowtide.LowtideError, match=r"lowtide\.remove\(model\)"):
        made.fit()
    lowtide.remove(made.model)
    assert lowtide.fitted(made.model) is None
    lowtide.apply(made.model, plan)
    gone = weakref.ref(made.model)
    del made, applied
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("wraps", [lambda model: model, nn.Sequential])
def test_a_second_fit_is_refused_with_the_way_out(wraps: Callable[[nn.Module], nn.Module]) -> None:
    made = Made()
    first = made.fit()
    with pytest.raises(lowtide.LowtideError, match=r"lowtide\.remove\(model\)"):
        lowtide.fit(wraps(made.model), made.step, (X, Y), budget="90%")
    assert lowtide.fitted(made.model) is first
    lowtide.remove(wraps(made.model))
    assert made.fit().verdict.proven


def test_a_fit_of_a_part_of_a_planned_model_is_refused() -> None:
    made = Made()
    made.fit()
    with pytest.raises(lowtide.LowtideError, match=r"it is a part of Sequential, on which a plan is in force"):
        lowtide.fit(made.model[0], made.step, (X, Y), budget="90%")


def test_sizes_are_found_too() -> None:
    made = Made()
    fitted = lowtide.fit(made.model, made.step, (X, Y), budget="90%", shapes="auto", optimizer=made.optimizers)
    assert lowtide.fitted(made.model) is fitted
    lowtide.remove(made.model)
    assert not any("_compiled_call_impl" in module.__dict__ for module in made.model.modules())


def test_levers_that_change_the_optimizer_want_a_single_one() -> None:
    fitted = Made().fit(levers=("outputs", "fused optimizer"))
    assert any("none or several were found" in note for note in fitted.plan.notes)


def test_an_argument_that_is_not_an_optimizer_is_named_in_the_error() -> None:
    made = Made()
    with pytest.raises(lowtide.RehearsalError, match="or a list of them, found str"):
        lowtide.fit(made.model, made.step, (X, Y), budget="90%", optimizer=["adam"])  # type: ignore[list-item]


@pytest.mark.parametrize("model", [train, [nn.Linear(2, 2)], None])
def test_an_argument_that_is_not_a_module_is_named_in_the_error(model: Any) -> None:
    made = Made()
    plan = lowtide.plan(lowtide.rehearse(made.model, made.step, (X, Y)), "100%")
    calls: list[Callable[[], object]] = [
        lambda: lowtide.fit(model, made.step, (X, Y), budget="90%"),
        lambda: lowtide.rehearse(model, made.step, (X, Y)),
        lambda: lowtide.apply(model, plan),
        lambda: lowtide.verify(model, made.step, (X, Y), plan),
        lambda: lowtide.timeline(model, made.step, (X, Y)),
        lambda: lowtide.fitted(model),
        lambda: lowtide.remove(model),
    ]
    for call in calls:
        with pytest.raises(lowtide.LowtideError, match=f"must be a torch.nn.Module, found {type(model).__name__}"):
            call()
