"""Several implementations of a recipe: the audit takes the fastest that is exact on this model and device."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.planner.records import Plan, Profile
from lowtide.profiler import implementations
from lowtide.report.plan_text import compare
from lowtide.runtime.recipes import IMPLEMENTATIONS, RECIPES
from lowtide.runtime.recipes.normalization import from_statistics

NODE = "NativeBatchNormBackward0"


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(3)]
    for layer in layers:  # another weight than 1 and another bias than 0, which hide how a kernel rounds
        nn.init.uniform_(layer[1].weight, 0.5, 1.5)
        nn.init.normal_(layer[1].bias)
    return nn.Sequential(*layers).to(dtype)


def rehearsed(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Profile, Tensor]:
    batch = torch.randn(4, 8, 24, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    return lowtide.rehearse(model, step_of(model), batch, in_place=False), batch


def step_of(model: nn.Module):  # type: ignore[no-untyped-def]
    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    return step


@contextmanager
def only(monkeypatch: pytest.MonkeyPatch, name: str, change) -> Iterator[list[int]]:  # type: ignore[no-untyped-def]
    """Have one implementation of batch norm: the one from saved statistics, changed; yields its number of runs."""
    recipe, runs = IMPLEMENTATIONS[NODE]["saved statistics"], [0]

    def function(*args: Tensor, **constants: float) -> Tensor:
        runs[0] += 1
        return change(recipe.function(*args, **constants))

    monkeypatch.setitem(IMPLEMENTATIONS, NODE, {name: replace(recipe, function=function)})
    monkeypatch.setattr(implementations, "CLEARLY", float("inf"))  # whatever the times are here
    yield runs


@pytest.mark.parametrize("shape", [(8, 16, 9, 11), (32, 48), (3, 5, 17), (2, 8, 4, 4, 4)], ids=len)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_from_saved_statistics_has_the_same_bits_in_single_precision(
    shape: tuple[int, ...], affine: bool
) -> None:
    x, n = torch.randn(shape) * 2 + 0.3, shape[1]
    weight, bias = (torch.rand(n) + 0.5, torch.randn(n)) if affine else (None, None)
    expected, mean, invstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
    assert torch.equal(from_statistics(x, weight, bias, mean, invstd, 1e-5), expected)


def test_an_exact_implementation_is_taken_named_and_used_and_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    with only(monkeypatch, "quick statistics", lambda result: result) as runs:
        model = network()
        profile, batch = rehearsed(model)
        assert profile.implementations == {NODE: "quick statistics"}
        made = lowtide.plan(profile, "70%")
        assert any(node == NODE for node in made.recompute.values())
        text = f"outputs of {NODE} are recomputed from quick statistics"
        assert text in str(made)
        assert text in str(profile)
        assert Plan.from_json(made.to_json()) == made
        runs[0] = 0
        verdict = lowtide.verify(model, step_of(model), batch, made)
        assert verdict.identical
        assert verdict.within_budget
        assert runs[0] > 0


def test_one_that_differs_in_a_bit_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly(result: Tensor) -> Tensor:
        return torch.nextafter(result, result + 1)

    with only(monkeypatch, "nearly", nearly) as runs:
        profile, _ = rehearsed(network())
        assert runs[0] > 0
        assert profile.implementations == {}


def test_one_that_fails_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(result: Tensor) -> Tensor:
        raise OSError("no such kernel")

    with only(monkeypatch, "broken", fail) as runs:
        profile, _ = rehearsed(network())
        assert runs[0] > 0
        assert profile.implementations == {}


def test_saved_statistics_are_not_used_where_they_are_rounded_to_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(implementations, "CLEARLY", float("inf"))
    profile, _ = rehearsed(network(torch.bfloat16), torch.bfloat16)
    assert profile.implementations == {}
    assert any(value.recipe == NODE for value in profile.values)


def test_an_exact_one_that_is_no_faster_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with only(monkeypatch, "exact", lambda result: result):
        monkeypatch.setattr(implementations, "CLEARLY", 0.0)
        profile, _ = rehearsed(network())
        assert profile.implementations == {}


def test_plans_that_differ_in_an_implementation_are_told_apart() -> None:
    profile, _ = rehearsed(network())
    one = lowtide.plan(replace(profile, implementations={}), "70%")
    other = replace(one, implementations={NODE: "saved statistics"})
    assert compare(one, other).only_second == (f"implementation of {NODE}: saved statistics",)


def test_a_name_that_no_implementation_has_stands_for_the_first_one() -> None:
    model, plain = network(), network()
    profile, batch = rehearsed(model)
    made = replace(lowtide.plan(profile, "70%"), implementations={NODE: "of another version"})
    assert made.recompute
    with lowtide.apply(model, made):
        loss = step_of(model)(batch)
    assert torch.equal(loss, step_of(plain)(batch))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_every_other_implementation_is_of_a_recipe() -> None:
    assert IMPLEMENTATIONS.keys() <= RECIPES.keys()
