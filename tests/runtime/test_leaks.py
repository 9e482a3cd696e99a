"""A step leaves nothing behind: no bytes and no objects, also with the garbage collector off, however it ends."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.events import Allocate, Free, Mark
from lowtide.runtime import recompute as recompute
from lowtide.runtime.forward_pass import CallScope, ForwardPass
from lowtide.runtime.recompute import Recompute
from lowtide.runtime.replay import ReplayFrame
from lowtide.runtime.saved_values import Handle, Value
from parts import Language
from runtime.plans import WAYS, in_force

IDS = torch.arange(40).view(4, 10)


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_before_does_not_count() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.collect()


class Fails(nn.Module):
    """Raises in forward, or in backward, on request."""

    where = ""

    def forward(self, x):
        if self.where == "forward":
            raise ValueError("in forward")
        y = x * 1
        if self.where == "backward":
            y.register_hook(self.fail)
        return y

    @staticmethod
    def fail(grad):
        raise ValueError("in backward")


def backward(model):
    model(IDS).square().sum().backward()


def dropped(model):
    model(IDS).square().sum()


def dropped_half_way(model):
    loss = model(IDS).square().sum()
    torch.autograd.grad(loss, model.blocks[1].out.weight, retain_graph=True)


def twice(model):
    loss = model(IDS).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def twice_differentiated(model):
    (gradient,) = torch.autograd.grad(model(IDS).square().sum(), model.norm.weight, create_graph=True)
    gradient.square().sum().backward()


def fails_in_forward(model):
    model.blocks[1].mlp[-1].where = "forward"
    with pytest.raises(ValueError, match="forward"):
        model(IDS)


def fails_in_backward(model):
    model.blocks[1].mlp[-1].where = "backward"
    with pytest.raises(ValueError, match="backward"):
        model(IDS).square().sum().backward()


def fails_in_a_recompute(model):
    loss = model(IDS).square().sum()
    plain, forward = recompute.without_grad_and_autocast, model.blocks[1].mlp.forward

    def fail(*args):
        raise ValueError("in a recompute")

    recompute.without_grad_and_autocast = model.blocks[1].mlp.forward = fail
    try:
        loss.backward()
    except ValueError:
        pass
    finally:
        recompute.without_grad_and_autocast, model.blocks[1].mlp.forward = plain, forward


def looked_at(model):
    node = model(IDS).grad_fn
    while node is not None:
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
        node = next((upstream for upstream, _ in node.next_functions if upstream is not None), None)


def level_after(stream, mark: str) -> list[int]:
    """Live bytes at each such mark, over the beginning of the recording."""
    level, sizes, found = 0, {}, []
    for event in stream:
        if isinstance(event, Allocate):
            sizes[event.block] = event.bytes
            level += event.bytes
        elif isinstance(event, Free):
            level -= sizes.pop(event.block, 0)
        elif isinstance(event, Mark) and event.label == mark:
            found.append(level)
    return found


def ours() -> list[object]:
    kinds = {Value, Handle, ReplayFrame, Recompute, ForwardPass, CallScope}
    return [found for found in gc.get_objects() if type(found) in kinds]


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "step",
    [
        backward, dropped, dropped_half_way, twice, twice_differentiated, fails_in_forward, fails_in_backward,
        fails_in_a_recompute, looked_at,
    ],
)  # fmt: skip
def test_live_bytes_after_many_steps_are_those_after_three(way, step: Callable[[nn.Module], None]):
    steps = 20 if step in (backward, dropped) else 6
    model = Language(layers=2)
    model.blocks[1].mlp.append(Fails())
    if step is twice_differentiated:
        torch.backends.cuda.enable_flash_sdp(False)
    try:
        with in_force(model, way), CpuRecorder() as recorder:
            for number in range(1, steps + 1):
                step(model)
                model.zero_grad(set_to_none=False)
                if number in (3, steps):
                    recorder.mark("check")
            assert ours() == []
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    early, late = level_after(recorder.stream, "check")
    assert late == early


@pytest.mark.default_cases(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backward", [True, False])
def test_nor_do_caches_of_keys_and_values(way, backward):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=3, n_head=2)).train()
    with in_force(model, way, GPT2Block), CpuRecorder() as recorder:
        for number in range(1, 13):
            out = model(input_ids=IDS, labels=IDS)
            if backward:
                out.loss.backward()
            del out
            model.zero_grad(set_to_none=False)
            if number in (3, 12):
                recorder.mark("check")
        assert ours() == []
    early, late = level_after(recorder.stream, "check")
    assert late == early


@pytest.mark.parametrize("way", ["keep", "recompute"])
def test_a_model_that_keeps_its_output_is_freed_without_a_backward(way):
    class Keeps(Language):
        def forward(self, ids):
            self.last = super().forward(ids)
            return self.last

    model = Keeps(layers=1)
    with in_force(model, way):
        model(IDS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert ours() == []


@pytest.mark.parametrize("way", ["recompute", "replay", "nest", "both"])
def test_tensors_that_are_not_kept_are_freed_after_forward(way):
    model = Language(layers=3)

    def held(way) -> int:
        with in_force(model, way), CpuRecorder() as recorder:
            loss = model(IDS).square().sum()
            recorder.mark("forward is over")
        del loss
        return level_after(recorder.stream, "forward is over")[0]

    kept, found = held("keep"), held(way)
    assert found < kept / 2


@pytest.mark.parametrize("way", ["recompute", "replay", "nest"])
def test_read_tensors_are_released_although_the_graph_stays(way):
    model = Language(layers=2)
    with in_force(model, way):
        loss = model(IDS).square().sum()
        for _ in range(2):
            loss.backward(retain_graph=True)
            values = [found for found in ours() if type(found) is Value]
            assert any(not value.kept for value in values)
            assert [value for value in values if not value.kept and value.tensor is not None] == []
        del values
        torch.autograd.grad(loss, model.blocks[1].norm1.weight, retain_graph=True)  # only the later part is read
        loss.backward()
