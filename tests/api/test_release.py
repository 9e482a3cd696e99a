"""That what backward left behind goes, that nothing else does, and that values stay."""

import gc
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal
from conftest import RunPython
from lowtide._torch.backward import ENGINE
from lowtide.errors import LowtideError
from parts import COMPILED


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def saved_by_tanh(model: nn.Module, x: Tensor) -> tuple[Tensor, weakref.ref[torch.UntypedStorage]]:
    """An output of the model, and the storage of the activation that its graph keeps."""
    kept: list[weakref.ref[torch.UntypedStorage]] = []
    handle = model[1].register_forward_hook(lambda m, a, out: kept.append(weakref.ref(out.untyped_storage())))
    output = model(x)
    handle.remove()
    return output, kept[0]


def test_release_drops_the_graph_and_keeps_the_values(model: nn.Module) -> None:
    output, activation = saved_by_tanh(model, torch.ones(4, 8))
    loss = output.square().mean()
    loss.backward(retain_graph=True)
    values, address = output.tolist(), output.data_ptr()
    assert activation() is not None
    assert lowtide.release(loss, {"output": output}) == 2
    assert activation() is None
    assert (output.tolist(), output.data_ptr(), output.grad_fn) == (values, address, None)


def test_release_leaves_what_another_tensor_still_needs(model: nn.Module) -> None:
    output, activation = saved_by_tanh(model, torch.ones(4, 8))
    first, second = output[:, 0].sum(), output[:, 1].sum()
    first.backward(retain_graph=True)
    lowtide.release(first)
    assert activation() is not None
    second.backward()


@dataclass(slots=True)
class Link:
    value: Any
    before: Any = None


def test_release_looks_into_slots_and_queues_however_deep(model: nn.Module) -> None:
    chain = None
    outputs = deque(model(torch.ones(1, 8)) for _ in range(3))
    for number in range(3000):
        chain = Link(outputs[number] if number < 2 else number, chain)
    assert lowtide.release(chain) == 2
    assert lowtide.release(outputs) == 1
    assert not any(output.requires_grad for output in outputs)


def test_a_view_is_released_too(model: nn.Module) -> None:
    output, activation = saved_by_tanh(model, torch.ones(4, 8))
    view = output[:, 0]
    view.sum().backward(retain_graph=True)
    values = view.tolist()
    assert lowtide.release([output, view]) == 2
    assert (view.grad_fn, view.tolist(), activation()) == (None, values, None)


def test_a_view_that_cannot_be_released_says_so(model: nn.Module) -> None:
    view = model(torch.ones(4, 8))[:, 0]
    watching = weakref.ref(view)
    with pytest.raises(LowtideError, match=r"a view of shape \(4,\) cannot be detached in place"):
        lowtide.release(view)
    assert watching() is view


def test_release_of_a_module_drops_graphs_of_gradients(model: nn.Module) -> None:
    model(torch.ones(4, 8)).square().sum().backward(create_graph=True)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert lowtide.release(model) == 4
    for parameter, before in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.grad_fn is None
        assert torch.equal(parameter.grad, before)


def test_a_step_drops_what_backward_left(model: nn.Module) -> None:
    with lowtide.step() as step:
        output, activation = saved_by_tanh(model, torch.ones(4, 8))
        loss = output.square().mean()
        loss.backward(retain_graph=True)
    assert (step.n_released, activation(), loss.grad_fn, output.grad_fn) == (2, None, None, None)


def test_a_step_leaves_graphs_that_no_backward_came_to(model: nn.Module) -> None:
    with lowtide.step() as step:
        model(torch.ones(4, 8)).sum().backward()
        later = model(torch.ones(4, 8)).sum()
    assert step.n_released == 0
    later.backward()


def test_a_step_drops_the_rest_of_a_partial_backward(model: nn.Module) -> None:
    with lowtide.step():
        output, activation = saved_by_tanh(model, torch.ones(4, 8))
        loss = output.sum()
        loss.backward(inputs=list(model[2].parameters()))
        assert activation() is not None
        del output
    assert activation() is None
    assert loss.requires_grad is False


def test_a_step_drops_the_graphs_of_gradients(model: nn.Module) -> None:
    with lowtide.step():
        model(torch.ones(4, 8)).square().sum().backward(create_graph=True)
    assert [p.grad.grad_fn for p in model.parameters() if p.grad is not None] == [None] * 4


def test_a_step_keeps_nothing_and_leaves_torch_as_it_was(model: nn.Module) -> None:
    engine = getattr(torch.autograd, ENGINE)
    gc.collect()
    gc.disable()
    try:
        with lowtide.step():
            output, activation = saved_by_tanh(model, torch.ones(4, 8))
            node = weakref.ref(output)
            del output
            assert (activation(), node()) == (None, None)
    finally:
        gc.enable()
    assert getattr(torch.autograd, ENGINE) is engine


def test_gradients_are_the_same_under_step(model: nn.Module) -> None:
    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(torch.ones(4, 8)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with lowtide.step():
        stepped = gradients()
    assert equal(plain, stepped)


def test_loss_only() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=16, vocab_size=512, use_cache=False)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 512, (4, 16))

    def step() -> tuple[int, float, list[Tensor], bool]:
        torch.manual_seed(1)
        model.zero_grad()
        with lowtide.measure(model) as memory:
            outputs = model(input_ids=ids, labels=ids)
            outputs.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return memory.peak_bytes, outputs.loss.item(), gradients, outputs.logits is None

    plain_peak, plain_loss, plain_gradients, plain_has_none = step()
    with lowtide.loss_only(model):
        peak, loss, gradients, has_none = step()
        model.eval()
        assert model(input_ids=ids, labels=ids).logits is not None
        model.train()
        assert model(input_ids=ids).logits is not None  # no labels, no loss
    assert (plain_has_none, has_none) == (False, True)
    assert plain_peak - peak == 4 * 16 * 512 * 4  # the logits
    assert loss == plain_loss
    assert equal(plain_gradients, gradients)
    assert model(input_ids=ids, labels=ids).logits is not None


STEPS_OF_COMPILED = (
    COMPILED
    + """
import lowtide
for number in range(4):
    with lowtide.step() as step:
        output = model(torch.randn(80, 64))
        output.square().mean().backward()
    assert step.n_released and output.grad_fn is None
assert counters["frames"]["total"] == 1 and not counters["graph_break"], (counters["frames"], counters["graph_break"])
"""
)


@pytest.mark.slow
def test_a_model_that_is_compiled_where_it_stands_is_compiled_once(tmp_path: Path, run_python: RunPython) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEPS_OF_COMPILED, encoding="utf-8")
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr
