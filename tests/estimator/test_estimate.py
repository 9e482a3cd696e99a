"""A step on fake tensors needs what the same step needs on real ones, by the CPU's own allocator."""

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.memory.memory_timeline import Timeline
from lowtide.units import format_bytes
from models import MODELS, build
from zoo import ZOO

ROUTED = {"experts", "mixtral"}


def activations(timeline: Timeline) -> list[tuple[str, int]]:
    """Module and bytes of each tensor alive at the peak that a module has saved."""
    labelled = [(b.label, b.bytes) for b in timeline.alive_at_peak()["activations"] if b.label is not None]
    return sorted((label.module, n_bytes) for label, n_bytes in labelled if label.module)


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("name", ZOO)
def test_the_peak_of_a_step_is_the_measured_one(name: str) -> None:
    model, batch, step = ZOO[name]()
    estimated = lowtide.estimate(model, step, batch)
    gc.collect()  # what earlier tests left must not be freed while this one measures
    measured = lowtide.timeline(model, step, batch)
    assert estimated.timeline.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01 if name in ROUTED else 0.002)
    assert estimated.unknown == ()
    assert bool(estimated.assumed) == (name in ROUTED)
    assert all(":" in line and "evenly" in line for line in estimated.assumed)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", MODELS)
def test_phases_categories_and_static_bytes_are_the_measured_ones(name: str) -> None:
    case = build(name)
    estimated = lowtide.estimate(case.model, case.step, case.batch)
    measured = lowtide.timeline(case.model, case.step, case.batch)
    phases = {phase.name: phase.peak_bytes for phase in estimated.timeline.phases}
    assert phases == pytest.approx({phase.name: phase.peak_bytes for phase in measured.phases}, rel=0.002)
    assert activations(estimated.timeline) == activations(measured)
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())
    counters = sum(4 for p in case.model.parameters() if p.requires_grad)  # AdamW's step counters
    assert estimated.static.parameters == parameters
    assert estimated.static.optimizer == 2 * parameters + counters
    assert estimated.peak_bytes == estimated.static.total + estimated.timeline.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_plan_can_be_estimated_for_its_own_model(name: str) -> None:
    case = build(name)
    plan = lowtide.plan(lowtide.rehearse(case.model, case.step, case.batch), "70%")
    estimated = lowtide.estimate(case.model, case.step, case.batch, plan=plan)
    measured = lowtide.timeline(case.model, case.step, case.batch, plan=plan)
    plain = lowtide.estimate(case.model, case.step, case.batch)
    assert estimated.timeline.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.005)
    assert estimated.peak_bytes < 0.75 * plain.peak_bytes
    larger = {key: tensor.repeat(2, 1) for key, tensor in case.batch.items()}
    estimated = lowtide.estimate(case.model, case.step, larger, plan=plan)
    with lowtide.apply(case.model, plan, say=lambda what: None):
        case.step(larger)  # the optimizer's state comes in the first step, which can be its peak
        with lowtide.measure() as memory:
            case.step(larger)
    assert estimated.timeline.peak_bytes == pytest.approx(memory.peak_bytes, rel=0.005)
    other = build("bert")
    with pytest.raises(lowtide.StalePlan, match="BertForMaskedLM"):
        lowtide.estimate(other.model, other.step, other.batch, plan=plan)


def test_a_plan_of_compiled_code_is_refused() -> None:
    model, batch = nn.Linear(4, 4), torch.ones(2, 4)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    profile = lowtide.rehearse(model, step, batch)
    plan = replace(lowtide.plan(profile, "100%"), graphs=("0123456789abcdef",))
    with pytest.raises(lowtide.RehearsalError, match="this plan is of compiled code"):
        lowtide.estimate(model, step, batch, plan=plan)


def _small(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.optim.AdamW(model.parameters())


def test_a_model_on_the_meta_device_needs_what_a_real_one_does() -> None:
    batch = torch.randn(128, 64), torch.zeros(128, dtype=torch.long)
    peaks = []
    for device in ("cpu", "meta"):
        model, optimizer = _small(device)
        held = [*model.parameters()]

        def step(batch, model=model, optimizer=optimizer):
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()

        peaks.append(lowtide.estimate(model, step, batch).peak_bytes)
        assert [p.device.type for p in model.parameters()] == [device] * 4
        assert all(p is q and type(p) is nn.Parameter for p, q in zip(model.parameters(), held, strict=True))
        assert not optimizer.state
    assert peaks[0] == peaks[1]


def test_a_meta_model_comes_back_when_the_step_raises() -> None:
    model, _ = _small("meta")

    def step(batch):
        model(batch).sum().backward()
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        lowtide.estimate(model, step, torch.randn(8, 64))
    assert [(p.device.type, p.grad, type(p)) for p in model.parameters()] == [("meta", None, nn.Parameter)] * 4


def test_it_reads_like_a_table() -> None:
    case = build("gpt2")
    estimate = lowtide.estimate(case.model, case.step, case.batch)
    text = str(estimate)
    assert text.startswith(f"peak {format_bytes(estimate.peak_bytes)}, in phase backward")
    assert re.search(r"^  optimizer state  .*  there before$", text, re.MULTILINE)


def test_steps_that_can_not_be_estimated_are_refused() -> None:
    with pytest.raises(lowtide.RehearsalError, match="eval mode"):
        lowtide.estimate(nn.Linear(2, 2).eval(), lambda batch: None, None)


def test_other_memory_of_the_step_counts() -> None:
    teacher = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512)).eval().requires_grad_(False)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 512))
    scale = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([*model.parameters(), scale])

    def step(batch):
        optimizer.zero_grad()
        ((model(batch) - teacher(batch)).square().mean() + scale.sum()).backward()
        optimizer.step()

    batch = torch.randn(32, 64)
    step(batch)
    estimated, rehearsed = lowtide.estimate(model, step, batch), lowtide.rehearse(model, step, batch)
    assert estimated.static.total == rehearsed.static.total
    assert rehearsed.static.others == sum(t.nbytes for t in (*teacher.parameters(), *teacher.buffers()))
    trained = sum(p.nbytes for p in (*model.parameters(), scale))
    assert estimated.static.parameters == trained + sum(p.nbytes for p in teacher.parameters())
    assert lowtide.estimate(model, step, batch, device="L4").static.parameters == estimated.static.parameters


@pytest.mark.parametrize("device", [None, "L4"])
def test_gradients_of_each_sample_and_along_a_direction(device) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x[None],)).sum()

    def step(batch):
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        of_each = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(parameters, batch)
        assert of_each["0.weight"].shape == (32, 16, 8)
        _, along = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
        assert along.shape == (32, 1)
        model(batch).sum().backward()

    settings = {} if device is None else {"device": device}
    assert lowtide.estimate(model, step, torch.randn(32, 8), **settings).timeline.peak_bytes > 32 * 16 * 8 * 4


@pytest.mark.parametrize("wrapped", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_leftovers_of_the_previous_step_on_modules_count(wrapped: Callable[[nn.Module], nn.Module]) -> None:
    """`self.weight` is computed in each forward, and the previous one lives until then."""
    model, x = nn.Sequential(wrapped(nn.Linear(128, 128)), nn.Linear(128, 128)), torch.randn(128, 128)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    estimated, profile = lowtide.estimate(model, step, x), lowtide.rehearse(model, step, x)
    assert estimated.static.carried_over >= 128 * 128 * 4
    assert estimated.static == profile.static
    assert estimated.peak_bytes == pytest.approx(profile.measured_plain_peak_bytes, rel=0.001)


@pytest.mark.parametrize("where", [{}, {"device": "L4"}])
def test_tensors_of_which_a_tensor_is_made(where: dict[str, Any]) -> None:
    """As positions of images are, in models of language and vision."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(100, 64), nn.Linear(64, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            offsets = torch.tensor([row.max() + 1 for row in ids], device=ids.device)
            scales = torch.tensor(data=[row.mean().half() for row in self.embedding(ids).detach()])
            assert (offsets.dtype, scales.dtype) == (torch.long, torch.half)
            if int(offsets[0]) != int(ids[0].max()) + 1:  # known, as the batch is
                raise AssertionError
            return self.linear(self.embedding(ids)) + offsets.view(-1, 1, 1) * scales.view(-1, 1, 1).to(ids.device)

    model, ids = Positions(), torch.randint(100, (4, 16))

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    estimated = lowtide.estimate(model, step, ids, **where)
    if not where:
        measured = lowtide.timeline(model, step, ids)
        assert estimated.timeline.peak_bytes == measured.peak_bytes


@pytest.mark.parametrize("where", [{}, {"device": "L4"}])
def test_a_number_of_a_tensor_that_was_made_in_inference_mode(where: dict[str, Any]) -> None:
    model = nn.Linear(8, 8)

    def step(batch: torch.Tensor) -> float:
        with torch.inference_mode():
            before, known = model(batch).square().mean(), batch.mean() * 1.0
        (model(batch) * float(known)).square().mean().backward()
        return float(before) + before.item()

    assert lowtide.estimate(model, step, torch.randn(4, 8), **where).peak_bytes > 0


class Subclass(torch.Tensor):
    """Tensor class of the user's own."""


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Subclass))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).as_subclass(torch.Tensor)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.nested_tensor([x[i, : 2 + i] for i in range(4)], layout=torch.jagged)
        return torch.stack([row.mean(0) for row in torch.nn.functional.gelu(self.linear(rows)).unbind()])


@pytest.mark.parametrize(
    ("model", "x", "where", "said"),
    [
        (Own(), torch.randn(4, 8), {}, "weight is a Subclass"),
        (Own(), torch.randn(4, 8), {"device": "L4"}, "weight is a Subclass"),
        (Jagged(), torch.randn(4, 8, 8), {}, "nested tensors"),
        (torch.jit.trace(nn.Linear(8, 8), torch.randn(4, 8)), torch.randn(4, 8), {"device": "L4"}, "TorchScript"),
    ],
)
def test_tensor_kinds_without_fake_tensors_are_refused(model, x, where, said) -> None:
    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()

    with pytest.raises(lowtide.RehearsalError, match=said):
        lowtide.estimate(model, step, x, **where)
    if said == "nested tensors":
        with pytest.raises(lowtide.RehearsalError, match=said):
            lowtide.rehearse(model, step, x)


CALLS = [lowtide.rehearse, lowtide.timeline, lowtide.estimate, partial(lowtide.estimate, device="L4")]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_batches_are_refused_only_if_they_enter_the_model(layout: torch.layout) -> None:
    model = nn.Linear(8, 8)
    batch = torch.nested.nested_tensor([torch.randn(2 + i, 8) for i in range(4)], layout=layout)

    def step(batch: torch.Tensor) -> None:
        torch.cat([*model(batch).unbind()]).square().mean().backward()

    def padded(batch: torch.Tensor) -> None:
        model(torch.nested.to_padded_tensor(batch, 0.0)).square().mean().backward()

    for call in CALLS:
        with pytest.raises(lowtide.RehearsalError, match="nested tensors"):
            call(model, step, batch)
    with pytest.raises(lowtide.RehearsalError, match="can't be resized"):
        lowtide.largest_batch(model, step, batch, budget="1MiB")
    assert lowtide.rehearse(model, padded, batch).slots


@pytest.mark.filterwarnings("error:The .grad attribute")
def test_parameters_swapped_for_a_call_have_no_gradients_of_their_own() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: torch.Tensor) -> None:
        doubled = {name: parameter * 2 for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, doubled, (batch,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with lowtide.within("100%", progress=False) as run:
        for _ in range(3):
            step(batch)
    assert run.plan is not None


def test_gradients_of_traced_modules_are_as_they_were() -> None:
    model, x = nn.Sequential(torch.jit.trace(nn.Linear(8, 8), torch.randn(4, 8)), nn.Linear(8, 8)), torch.randn(4, 8)
    lowtide.estimate(model, lambda batch: model(batch).sum().backward(), x)
    assert [p.grad for p in model.parameters()] == [None] * 4


def test_memory_that_depends_on_numbers_is_listed_as_unknown() -> None:
    model, x = nn.utils.parametrizations.orthogonal(nn.Linear(32, 32)), torch.randn(4, 32)
    estimated = lowtide.estimate(model, lambda batch: model(batch).sum().backward(), x)
    assert "linalg_matrix_exp" in str(estimated.unknown)
