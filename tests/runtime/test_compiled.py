"""Models whose blocks are compiled, each in its place: blocks are run again as they were compiled, to the same bits."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import lowtide
from models import Case, same, state
from parts import Convolves

pytestmark = pytest.mark.usefixtures("empty_compile_caches")


class Attends(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


@pytest.fixture
def inductor() -> None:
    """Skips without a compiler of C++, in which inductor writes for processors."""
    if not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        pytest.skip("inductor needs a compiler of C++, and there is none")


def built(
    kind: Callable[[], nn.Module],
    shape: tuple[int, ...],
    *,
    backend: str = "aot_eager",
    autocast: bool = False,
    in_place: bool = True,
) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(4)])
    for name, block in list(model.named_children()):
        if in_place:
            block.compile(backend=backend)
        else:
            model.add_module(name, torch.compile(block, backend=backend))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters())

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()

    def step(x: Tensor) -> Tensor:
        with precision():
            loss = (model(x).float() - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(model, torch.randn(shape), step, optimizer)  # type: ignore[arg-type]


KINDS: dict[str, Callable[..., Case]] = {
    "attention": lambda **how: built(Attends, (8, 64, 64), **how),
    "batch norm": lambda **how: built(Convolves, (8, 16, 32, 32), **how),
    "autocast": lambda **how: built(Attends, (8, 64, 64), autocast=True, **how),
    "wrapped": lambda **how: built(Attends, (8, 64, 64), in_place=False, **how),
}


def train(case: Case, *sizes: int) -> None:
    torch.manual_seed(7)
    for size in sizes:
        case.step(case.batch[:size])  # type: ignore[index]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", KINDS)
def test_compiled_blocks_are_run_again_to_the_same_bits(name: str) -> None:
    planned = KINDS[name]()
    profile = lowtide.rehearse(planned.model, planned.step, planned.batch)
    assert [(call.refused, call.flops > 0) for call in profile.calls[1:]] == 4 * [(None, True)]
    with lowtide.fit(planned.model, planned.step, planned.batch, budget="60%", profile=profile) as fitted:
        assert fitted.plan.replay
        assert fitted.verdict.identical
        assert fitted.verdict.measured_peak_bytes <= fitted.plan.budget_bytes
        assert fitted.verdict.predicted_peak_bytes == pytest.approx(fitted.verdict.measured_peak_bytes, rel=0.01)
        train(planned, 8, 8, 8)
        assert not fitted.applied.drifted
    plain = KINDS[name]()  # only now: what is compared with is not in the budget
    train(plain, 8, 8, 8)
    assert same(state(plain), state(planned))


@pytest.mark.slow
def test_blocks_compiled_by_inductor_are_planned_too(inductor: None) -> None:
    planned = KINDS["attention"](backend="inductor")
    with lowtide.fit(planned.model, planned.step, planned.batch, budget="65%") as fitted:
        assert fitted.plan.recompute or fitted.plan.replay
        assert fitted.verdict.identical
        train(planned, 8, 8)
    plain = KINDS["attention"](backend="inductor")
    train(plain, 8, 8)
    assert same(state(plain), state(planned))


def test_nothing_is_compiled_because_of_a_plan() -> None:
    case = KINDS["attention"]()
    train(case, 8)
    before = counters["stats"]["unique_graphs"]
    with lowtide.fit(case.model, case.step, case.batch, budget="60%"):
        train(case, 8, 8)
    train(case, 8)
    assert before > 0
    assert counters["stats"]["unique_graphs"] == before


class ScratchBlock(nn.Module):
    """A block that calls compiled code: a function, and perhaps a part of it."""

    def __init__(self, *, attends: bool, width: int = 64) -> None:
        super().__init__()
        self.attends = Attends(width) if attends else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activate = torch.compile(lambda x: F.gelu(x).square(), backend="aot_eager")
        if attends:
            self.attends.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activate(self.up(self.attends(x))))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("attends", [False, True])
def test_compiled_code_inside_of_what_is_replayed_stays_compiled(attends: bool) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[ScratchBlock(attends=attends) for _ in range(3)]), torch.randn(8, 64, 64)

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()

    with lowtide.fit(model, step, batch, budget="65%") as fitted:
        assert fitted.verdict.identical
        assert fitted.verdict.predicted_peak_bytes == pytest.approx(fitted.verdict.measured_peak_bytes, rel=0.01)
        assert fitted.plan.replay
        blocks = [call for call in fitted.profile.calls if call.cls == "ScratchBlock"]
        assert [(call.refused, call.flops > 0) for call in blocks] == 3 * [(None, True)]
    for part in model:
        assert isinstance(part, ScratchBlock)
        results = [part.activate(part.up(batch)), *([part.attends(batch)] if attends else [])]
        assert {result.grad_fn.name() for result in results if result.grad_fn} == {"CompiledFunctionBackward"}


def test_code_that_only_runs_compiled_is_replayed_and_its_flops_are_none() -> None:
    class Only(Attends):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                raise RuntimeError("out of memory")
            return super().forward(x)

    case = built(Only, (8, 64, 64))
    profile = lowtide.rehearse(case.model, case.step, case.batch)
    assert [(call.refused, call.flops) for call in profile.calls[1:]] == 4 * [(None, 0)]


@pytest.mark.slow
def test_batches_of_other_sizes_which_are_compiled_anew_have_the_same_bits() -> None:
    planned = KINDS["attention"]()
    with lowtide.fit(planned.model, planned.step, planned.batch, budget="60%"):
        train(planned, 8, 6, 5, 8)
    plain = KINDS["attention"]()
    train(plain, 8, 6, 5, 8)
    assert same(state(plain), state(planned))


def test_a_plan_for_the_model_as_it_was_before_it_was_compiled_is_refused() -> None:
    case = KINDS["attention"]()
    for block in case.model.children():
        del block.__dict__["_compiled_call_impl"]
    profile = lowtide.rehearse(case.model, case.step, case.batch)
    plan = lowtide.plan(profile, "60%")
    case.model[1].compile(backend="aot_eager")
    with pytest.raises(lowtide.StalePlan, match="model: made for Sequential"):
        lowtide.apply(case.model, plan)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("gpu", [None, "cuda:24GiB"])
@pytest.mark.parametrize("part", ["a block", "the whole"])
def test_compiled_code_is_estimated_as_it_was_written_and_that_is_said(part: str, gpu: str | None) -> None:
    model: Any = nn.Sequential(Attends(), Attends())
    how = {} if gpu is None else {"device": gpu}

    def estimated() -> Any:
        return lowtide.estimate(model, lambda x: model(x).sum().backward(), torch.randn(2, 8, 64), **how)  # type: ignore[call-overload]

    plain = estimated()
    if part == "a block":
        model[0].compile(backend="aot_eager")
    else:
        model = torch.compile(model, backend="aot_eager")
    found = estimated()
    assert found.peak_bytes == plain.peak_bytes
    assert any("compiled code (torch.compile) is estimated uncompiled" in line for line in found.assumed)
    model(torch.randn(2, 8, 64)).sum().backward()
