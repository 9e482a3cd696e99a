"""The Python calls that a plan adds to a step, in whole numbers: host time that no GPU hides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from overhead import COUNT, FOUR, Calls, Chain, Numbers, Short, count_python_calls, gpt2, resnet, step_of
from torch import nn

from lowtide.planner.address_nodes import NOTED
from lowtide.runtime import saved_values
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions

PER_STEP = 100
"""Calls of a planned step, however large the model is."""


def calls(model: nn.Module, step: Callable[[], object], decided: dict[str, str], **more: Any) -> tuple[int, int]:
    """Return the Python calls of a step without a plan, and of one after the plan's first."""
    n_plain = count_python_calls(step)
    engine = Engine(model, parse_actions(decided, more.get("replay", [])), in_place=[more.get("in_place", {})])
    engine.install()
    step()
    n_planned = count_python_calls(step)
    assert not engine.packer.drifted
    engine.remove()
    return n_plain, n_planned


def per_slot(model: nn.Module, decided: dict[str, str], replay: list[str] | None = None) -> float:
    """Return the Python calls that a plan adds for each of `COUNT` saved tensors or calls."""

    def step() -> None:
        model(FOUR).sum().backward()

    n_plain, n_planned = calls(model, step, decided, replay=replay or [])
    return (n_planned - n_plain - PER_STEP) / COUNT


def test_a_saved_tensor_beside_a_decided_one() -> None:
    most = 2 if saved_values.native is None else 0  # one to pack it, one to unpack it
    assert per_slot(Chain(), {"#0:100": "TanhBackward0"}) <= most


def test_a_recomputed_tensor() -> None:
    most = 16 if saved_values.native is None else 1
    assert per_slot(Chain(), {f"#0:{n}": "TanhBackward0" for n in range(1, COUNT)}) <= most


def test_a_recomputed_tensor_with_a_number() -> None:
    most = 39 if saved_values.native is None else 10
    assert per_slot(Numbers(), {f"#0:{n}": f"AddBackward0{NOTED}" for n in range(1, COUNT)}) <= most


def test_a_write_while_tensors_are_relied_on() -> None:
    """A counter of batches is written to in each call of a layer, as in a batch norm; no recompute reads it."""

    class Counting(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4))
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x + self.shift).tanh()
            for _ in range(COUNT):
                self.n.add_(1)
            return x

    assert per_slot(Counting(), {"#0:0": "TanhBackward0"}) <= 2.1


def test_a_module_call() -> None:
    assert per_slot(Calls(nn.Identity), {}) <= 0


def test_a_replayed_call() -> None:
    most = 88 if saved_values.native is None else 43
    assert per_slot(Calls(Short), {}, [f"parts.{n}#0" for n in range(COUNT)]) <= most


@pytest.mark.parametrize(
    ("build", "decided", "in_place", "most_kept", "most"),
    [
        (
            resnet,
            {
                f"resnet.encoder.stages.{stage}.layers.{layer}.layer.{part}.convolution#0:0": "ReluBackward0"
                for stage, n_layers in enumerate((3, 4, 6, 3))
                for layer in range(n_layers)
                for part in (1, 2)
            },
            {"ReluBackward0": 4096},
            1.03,
            1.5 if saved_values.native is None else 1.25,
        ),
        (
            gpt2,
            {
                f"transformer.h.{layer}.mlp.{slot}": node
                for layer in range(12)
                for slot, node in {
                    "act#0:2": f"AddBackward0{NOTED}",
                    "act#0:3": "MulBackward0",
                    "c_proj#0:0": "MulBackward0",
                }.items()
            },
            {"LogSoftmaxBackward0": 4096, "TanhBackward0": 4096},
            1.04,
            2.0 if saved_values.native is None else 1.35,
        ),
    ],
)
def test_a_step_of_a_whole_model(
    build: Callable[..., Any], decided: dict[str, str], in_place: dict[str, int], most_kept: float, most: float
) -> None:
    """A plan that keeps everything, and one as for three quarters of the peak."""
    torch.manual_seed(0)
    model, batch = build(tiny=True)
    step = step_of(model.train(), batch)
    n_plain, n_kept = calls(model, step, {})
    assert n_kept <= most_kept * n_plain
    _, n_planned = calls(model, step, decided, in_place=in_place)
    assert n_planned <= most * n_plain
