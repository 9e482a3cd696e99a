"""An elementwise recompute overwrites an operand that was recomputed only for it and that has no other holder."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import NewGELUActivation

import lowtide
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner import find_smallest_peak
from lowtide.runtime.recompute import Recompute
from runtime.plans import differences, in_force, outcome, step_of


class Applied(nn.Module):
    """`between` on what a linear layer gives, and another linear layer, which saves the result."""

    def __init__(self, between, width=64, outputs=64):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(width, width), between, nn.Linear(width, outputs)

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def fitted(profile):
    return lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)


@pytest.fixture
def nothing_written_over(monkeypatch):
    """Run the same without overwriting."""

    def none():
        monkeypatch.setattr(Recompute, "spare", lambda recompute, tensors: {})

    return none


def test_a_chain_is_made_in_one_tensor(nothing_written_over):
    model, x = Applied(lambda x: x * 2 * 3 * 0.5), torch.randn(512, 64)

    def tensors():
        with in_force(model, "recompute"):
            node = model(x).grad_fn
            with CpuRecorder() as recorder:
                made = node._saved_mat1
            assert torch.equal(made, model.first(x) * 2 * 3 * 0.5)
        return Timeline(recorder.stream).peak_bytes // x.nbytes

    assert tensors() == 1
    nothing_written_over()
    assert tensors() == 2


def test_overwritten_operands_are_recorded():
    torch.manual_seed(0)
    model, x = Applied(NewGELUActivation()), torch.randn(512, 64)
    values = lowtide.rehearse(model, step_of(model), x).values
    over = [(value.recipe, values[value.overwrites].recipe) for value in values if value.overwrites is not None]
    assert over == [
        ("MulBackward0", "PowBackward0"),
        ("AddBackward0", "MulBackward0"),
        ("MulBackward0", "AddBackward0"),
        ("TanhBackward0", "MulBackward0"),
    ]


def test_estimated_as_it_is():
    torch.manual_seed(0)
    model, x = Applied(NewGELUActivation(), outputs=1), torch.randn(512, 64)
    step = step_of(model)
    plan = fitted(lowtide.rehearse(model, step, x))
    estimated = lowtide.estimate(model, step, x, plan=plan).timeline
    measured = lowtide.timeline(model, step, x, plan=plan)
    assert estimated.peak_bytes == pytest.approx(measured.peak_bytes, abs=64)  # a tensor is 131,072


CASES = {
    "two read it": lambda x: (y := x * 2).tanh() + y.sigmoid(),
    "one reads it twice": lambda x: ((y := x * 2) + y).tanh(),
    "a view of it": lambda x: (x * 2).view(-1).tanh().view_as(x),
    "transposed": lambda x: (x * 2).t().contiguous().tanh().t().contiguous(),
    "a transposed operand": lambda x: (x * 2 + (x.t().contiguous() * 3).t()).tanh(),
    "a wider operand": lambda x: (x[:, :1] * 2 + x * 3).tanh(),
    "an operand of another type": lambda x: (x * 2 + (x * 3).double()).tanh().float(),
    "a number on the other side": lambda x: (1 - x * 2).tanh(),
    "a number of a wider type": lambda x: (x * 2 + torch.tensor(0.1, dtype=torch.float64)).tanh(),
    "of integers": lambda x: (torch.arange(64) * 2 + x * 2).tanh(),
    "in place": lambda x: (x * 2).add_(1).mul(3).tanh(),
    "of a parameter's kind": lambda x: (x + 0.0).relu() * 1.0,
    "expanded": lambda x: (x[:1] * 2).expand(64, 64).add(x).tanh(),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_same(case):
    torch.manual_seed(0)
    model, x = Applied(CASES[case]), torch.randn(64, 64)

    def twice():
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    for run in (lambda: step_of(model)(x), twice):
        plain = outcome(model, run)
        for way in ("recompute", "both"):
            with in_force(model, way, Applied):
                assert not differences(plain, outcome(model, run))


@pytest.mark.parametrize("case", CASES)
def test_predicted_as_measured(case):
    torch.manual_seed(0)
    model, x = Applied(CASES[case]), torch.randn(64, 64)
    plan = fitted(lowtide.rehearse(model, step_of(model), x))
    verdict = lowtide.verify(model, step_of(model), x, plan)
    assert verdict.identical
    assert verdict.measured_peak_bytes == plan.predicted.peak_bytes


ONE = ("tanh", "sigmoid", "sin", "cos", "relu", "abs")
TWO = ("add", "sub", "mul")
SHAPES = ((4, 6), (1, 6), (4, 1), (6,), (), (3, 4, 6))
MOVES = st.lists(
    st.tuples(
        st.sampled_from([*ONE, *TWO, "scaled", "shifted", "turned", "cast"]), st.integers(0, 9), st.integers(0, 9)
    ),
    min_size=2,
    max_size=12,
)


class Random(nn.Module):
    """Elementwise operations on each other's results."""

    def __init__(self, shapes, types, moves):
        super().__init__()
        torch.manual_seed(0)
        self.leaves = nn.ParameterList(
            nn.Parameter(torch.rand(shape, dtype=dtype)) for shape, dtype in zip(shapes, types, strict=True)
        )
        self.moves = moves

    def forward(self):
        found = [leaf * 1.5 for leaf in self.leaves]
        for name, first, second in self.moves:
            one, other = found[first % len(found)], found[second % len(found)]
            if name in ONE:
                found.append(getattr(torch, name)(one))
            elif name in TWO:
                found.append(getattr(torch, name)(one, other))
            elif name == "scaled":
                found.append(one * 0.3)
            elif name == "shifted":
                found.append(1.25 + one)
            elif name == "turned":
                found.append(one.mT if one.dim() == 2 and one.shape[0] == one.shape[1] else one.view_as(one))
            else:
                found.append(one.to(torch.float64))
        return sum(each.double().clamp(-9, 9).sum() for each in found[len(self.leaves) :])


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=3, max_size=3),
    types=st.lists(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), min_size=3, max_size=3),
    moves=MOVES,
)
def test_any_elementwise_graph_has_the_same_bits(shapes, types, moves):
    model = Random(shapes, types, moves)

    def run():
        return model().backward()

    plain = outcome(model, run)
    with in_force(model, "recompute"):
        assert not differences(plain, outcome(model, run))
