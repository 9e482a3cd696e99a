"""Savings of each `del` by `measure().dels()`: counted by hand, and compared with steps that do delete."""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowtide._torch.backward import ENGINE
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.del_savings import Del, Moment
from lowtide.memory.measure import Memory, measure

B, I, H, O = 6, 10, 14, 3  # noqa: E741  batch, inputs, hidden and outputs
F32 = 4  # bytes
X, HIDDEN, OUT = B * I * F32, B * H * F32, B * O * F32

BEFORE, AFTER, END = "before backward", "after backward", "at the end of the step"


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(I, H), nn.ReLU(), nn.Linear(H, O))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def freed(memory: Memory, moment: Moment) -> dict[str, int]:
    return {", ".join(row.names): row.freed_bytes for row in memory.dels() if row.moment == moment}


def saved(memory: Memory, name: str, moment: Moment) -> int:
    (row,) = (row for row in memory.dels() if row.names == (name,) and row.moment == moment)
    return row.saved_bytes


def test_the_loss_after_an_ordinary_backward_is_four_bytes(model: nn.Module) -> None:
    optimizer = sgd(model)
    x = torch.rand(B, I)
    with measure() as memory:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    assert freed(memory, BEFORE) == {"x": 0, "loss": 0}  # backward needs both
    assert freed(memory, AFTER) == freed(memory, END) == {"x": X, "loss": 4}
    assert {row.saved_bytes for row in memory.dels()} == {0}
    assert str(memory).splitlines()[-1] == "no `del` of these lowers the peak by 0.1 %: loss, x"


def test_a_retained_graph_goes_with_the_loss(model: nn.Module) -> None:
    x = torch.rand(B, I)
    with measure() as memory:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
    # The ReLU's result, the prediction (which square saved), the loss; the batch is the variable x's too.
    assert freed(memory, END) == {"x": 0, "loss": HIDDEN + OUT + 4, "loss, x": X + HIDDEN + OUT + 4}


def test_a_graph_that_two_variables_hold_goes_with_both(model: nn.Module) -> None:
    with measure() as memory:
        out = model(torch.rand(B, I))
        loss = out.sum()
        loss.backward(retain_graph=True)
    # The sum keeps no prediction. Each of the two leads to the rest of the graph, the batch included.
    assert freed(memory, END) == {"out": OUT, "loss": 4, "loss, out": X + HIDDEN + OUT + 4}


def test_memory_with_another_holder_is_not_freed(model: nn.Module) -> None:
    kept: list[Tensor] = []
    box: dict[str, Any] = {}

    def step() -> Memory:
        with measure() as memory:
            out = model(torch.rand(B, I))
            listed, single = [torch.rand(5), out], torch.rand(7)
            kept.append(out)
            box["inside"] = listed[0]
            out.sum().backward()
        del single
        return memory

    # kept and box are variables of this function, which step() cannot delete.
    assert freed(step(), END) == {"out": 0, "listed": 0, "single": 28}


def test_containers_and_views_count_with_their_whole_storage() -> None:
    with measure() as memory:
        nested = {"a": [torch.rand(10)], "b": (torch.rand(20)[:1],)}
        alias = nested["b"]
        weights = torch.rand(30).numpy()
        borrowed = torch.from_numpy(weights)
    assert freed(memory, END) == {"nested": 40, "alias": 0, "borrowed": 0, "alias, nested": 40 + 80}
    del alias, borrowed


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.x * gradients[0]


def test_an_attribute_of_ctx_goes_with_the_loss(model: nn.Module) -> None:
    with measure() as memory:
        loss = Square.apply(model(torch.rand(B, I))).sum()
        loss.backward()
    assert freed(memory, END) == {"loss": 4 + OUT}


# --- against steps that delete ---------------------------------------------------------------------------------------


def gpt2() -> tuple[nn.Module, Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=1000, n_positions=64, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    model = GPT2LMHeadModel(config)
    return model, torch.randint(0, 1000, (2, 32))


def test_outputs_before_backward_are_the_logits_and_save_what_a_del_saves() -> None:
    model, ids = gpt2()

    def step(*, deletes: bool) -> Memory:
        with measure() as memory:
            outputs = model(input_ids=ids, labels=ids)
            loss = outputs.loss
            if deletes:
                del outputs
            loss.backward()
        model.zero_grad()
        return memory

    step(deletes=False)
    plain, without = step(deletes=False), step(deletes=True)
    logits = 2 * 32 * 1000 * F32
    assert freed(plain, BEFORE)["outputs"] == logits
    assert "outputs" not in freed(without, BEFORE)
    assert saved(plain, "outputs", BEFORE) == plain.peak_bytes - without.peak_bytes > 0.9 * logits
    assert freed(plain, AFTER)["loss, outputs"] == logits + 4
    assert saved(plain, "outputs", AFTER) == 0


def test_leftovers_of_the_previous_step_count_at_the_end(model: nn.Module) -> None:
    optimizer = sgd(model)

    def train(*, deletes: bool) -> tuple[Memory, int]:
        for _ in range(3):
            x = torch.rand(64, I)
            entry = torch.rand(1)  # so that x is not all that is new
            with measure() as memory:
                loss = model(x).square().mean()
                loss.backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
            if deletes:
                del loss
        return memory, entry.numel()

    (plain, _), (without, _) = train(deletes=False), train(deletes=True)
    graph = 64 * (I + H + O) * F32 + 4  # with the batch of the step before, whose variable is bound again
    row = next(row for row in plain.dels() if row.names == ("loss",) and row.moment == END)
    # Without the old graph all levels are lower until it would have gone: peak over entry counts the entry without it.
    assert row.freed_bytes == graph
    assert plain.peak_bytes - row.saved_bytes == without.peak_bytes - graph
    assert saved(plain, "x", END) == 0  # of this step, not left from the one before


def test_the_batch_before_a_loop_ends_is_not_left_over(model: nn.Module) -> None:
    x = torch.rand(B, I)
    with measure() as memory:
        model(x)
    (row,) = memory.dels()
    assert row == Del(names=("x",), moment=END, freed_bytes=X, saved_bytes=0)


# --- the looking -----------------------------------------------------------------------------------------------------


def test_looking_changes_no_event_and_keeps_nothing(model: nn.Module) -> None:
    ends: list[weakref.ref[Tensor]] = []

    def step() -> Memory:
        x = torch.rand(B, I)
        ends.append(weakref.ref(x))
        with measure() as memory:
            loss = F.mse_loss(model(x), torch.zeros(B, O))
            loss.backward()
            ends.append(weakref.ref(loss))
        model.zero_grad()
        return memory

    engine = getattr(torch.autograd, ENGINE)
    gc.disable()
    try:
        memory = step()
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()
    assert getattr(torch.autograd, ENGINE) is engine
    with CpuRecorder() as recorder:
        x = torch.rand(B, I)
        n_before = len(recorder.flush())
        F.mse_loss(model(x), torch.zeros(B, O)).backward()
        stop = len(recorder.flush())
    kinds = [[type(event) for event in stream] for stream in (memory.stream, recorder.stream.between(n_before, stop))]
    assert len(kinds[0]) == len(kinds[1]) - 1  # here the loss is let go of


def test_an_exit_stack_measures_the_function_that_enters_it() -> None:
    with ExitStack() as stack:
        memory = stack.enter_context(measure())
        mine = torch.rand(3)
    assert freed(memory, END) == {"mine": mine.nbytes}


def test_after_an_exception_there_are_none() -> None:
    mine = torch.rand(3)
    with pytest.raises(ZeroDivisionError), measure() as memory:
        mine = mine / 0 if mine.sum() < 0 else torch.tensor([1 / 0])
    assert memory.dels() == ()


@pytest.mark.parametrize(
    ("freed_bytes", "saved_bytes", "text"),
    [(0, 0, "0 B, nothing"), (4, 0, "4 B, nothing of the peak"), (2048, 1024, "2 KiB, 1 KiB of the peak")],
)
def test_a_row_in_words(freed_bytes: int, saved_bytes: int, text: str) -> None:
    row = Del(names=("a", "b"), moment=BEFORE, freed_bytes=freed_bytes, saved_bytes=saved_bytes)
    assert str(row) == f"del a, b before backward: {text}"


def test_a_block_of_many_short_steps_is_not_slowed_down_by_looks(model: nn.Module) -> None:
    n_steps = 200
    with measure() as memory:
        for _ in range(n_steps):
            F.mse_loss(model(torch.rand(B, I)), torch.zeros(B, O)).backward()
    assert memory.dels() == ()
    assert any(label.category == "activations" for label in memory.timeline.labels.values())
