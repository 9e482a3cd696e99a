"""Writes that no version counts and no method reports: a step ends in words, or has the plain step's bits."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide._torch.fake_modes import FakeTensorMode
from lowtide.runtime import inplace_methods
from lowtide.runtime import tensor_writers as writers
from runtime.diagonal_params import diagonal_params
from runtime.test_tensor_writers import OPERANDS, ROWS, Sum, plan_of, same, with_smallest_peak

RELU, MUL = torch.relu_, Tensor.mul_  # before any plan

Writer = Callable[[], object]


def out(operand: Tensor) -> Writer:
    return lambda: torch.mul(operand.data, 0.5, out=operand.data)


def operator(operand: Tensor) -> Writer:
    return lambda: torch.ops.aten.mul_(operand.data, 0.5)


def stored_function(operand: Tensor) -> Writer:
    return lambda: RELU(operand.data)


def stored_method(operand: Tensor) -> Writer:
    return lambda: MUL(operand.data[1:], 0.5)


def alias_from_before_forward(operand: Tensor) -> Writer:
    data = operand.data
    return lambda: torch.mul(data, 0.5, out=data)


def view_of_an_alias(operand: Tensor) -> Writer:
    view = operand.data.view(-1)[:8]
    return lambda: torch.ops.aten.add_(view, 1.0)


def array_from_before_forward(operand: Tensor) -> Writer:
    array = operand.detach().numpy()
    return lambda: array.fill(0.2)


UNSEEN = (
    out, operator, stored_function, stored_method, alias_from_before_forward, view_of_an_alias,
    array_from_before_forward,
)  # fmt: skip


def gradients(model: nn.Module, writer: Callable[[], object] = lambda: None) -> list[Tensor]:
    model.zero_grad()
    loss = model(ROWS)
    with torch.no_grad():
        writer()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("operand", "writer"), diagonal_params(OPERANDS, UNSEEN))
def test_an_unseen_writer_ends_one_step_in_words_and_the_plan_gives_way(
    operand: str, writer: Callable[[Tensor], Writer]
) -> None:
    make, find = OPERANDS[operand]
    model, plain = make(), make()
    with lowtide.apply(model, plan_of(operand), say=lambda what: None):
        for n in range(5):
            if n in (0, 3):
                assert same(gradients(model), gradients(plain))
                continue
            write = writer(find(plain))
            expected = gradients(plain, write)
            write = writer(find(model))
            if n == 1:
                with pytest.raises(writers.Overwritten, match="between forward and backward"):
                    gradients(model, write)
            else:
                assert same(gradients(model, write), expected)


@pytest.mark.parametrize("operand", OPERANDS)
def test_memory_that_is_only_read_through_data_or_an_array_changes_nothing(operand: str) -> None:
    make, find = OPERANDS[operand]
    model, plain, said = make(), make(), list[str]()
    with lowtide.apply(model, plan_of(operand), say=said.append):
        gradients(model)
        arrays = [p.detach().numpy() for p in (*model.parameters(), *model.buffers())]
        for _ in range(3):
            alias = find(model).data
            assert same(gradients(model, lambda: find(model).data.norm()), gradients(plain))
            assert alias.norm() > 0
    assert len(arrays) > 1
    assert said == []


@pytest.mark.parametrize("operand", ["a parameter, recomputed from", "a parameter of a block that is run again"])
def test_a_hook_in_backward_that_writes_to_the_data_of_an_earlier_layer_ends_the_step(operand: str) -> None:
    make, find = OPERANDS[operand]
    model, plain = make(), make()
    last = [*model.parameters()][-1]

    def write(_: Tensor) -> None:
        find(model).data.mul_(0.5)

    with lowtide.apply(model, plan_of(operand), say=lambda what: None):
        assert same(gradients(model), gradients(plain))
        handle = last.register_hook(write)
        with pytest.raises(writers.Overwritten):
            gradients(model)
        handle.remove()
        plain.load_state_dict(model.state_dict())
        assert same(gradients(model), gradients(plain))


def test_updates_by_hand_in_backward_end_no_step() -> None:
    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)

    def trained(model: nn.Module) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
        return [*gradients(model), *gradients(model), *(p.detach().clone() for p in model.parameters())]

    operand = "a parameter of a block that is run again"
    make, _ = OPERANDS[operand]
    model, said = make(), list[str]()
    with lowtide.apply(model, plan_of(operand), say=said.append):
        assert same(trained(model), trained(make()))
    assert said == []


@pytest.mark.parametrize("operand", OPERANDS)
def test_a_hidden_write_after_the_plan_was_removed_ends_the_step(operand: str) -> None:
    make, find = OPERANDS[operand]
    model = make()
    with lowtide.apply(model, plan_of(operand)):
        first, second = model(ROWS), model(ROWS)
    first.backward()
    find(model).data.mul_(0.5)
    with pytest.raises(writers.Overwritten):
        second.backward()


def test_fit_leaves_the_memory_of_a_model_unexposed() -> None:
    model = Sum()
    with_smallest_peak(model, [ROWS])
    assert all(t.untyped_storage().resizable() for t in (*model.parameters(), *model.buffers()))


def test_a_write_is_seen_while_another_thread_reports_one() -> None:
    """One thread is held up inside its report; the write of another one is reported all the same."""
    reporting, written = threading.Event(), threading.Event()
    seen: list[str] = []

    def writes(memory: object, writer: str) -> bool:
        seen.append(writer)
        if writer == "Tensor.add_":
            reporting.set()
            assert written.wait(10)
        return True

    stop = inplace_methods.intercept(writes)
    try:
        inplace_methods.watched = True
        thread = threading.Thread(target=lambda: torch.zeros(1).add_(1))
        thread.start()
        assert reporting.wait(10)
        torch.zeros(1).mul_(2)
        written.set()
        thread.join()
    finally:
        inplace_methods.watched = False
        stop()
    assert seen == ["Tensor.add_", "Tensor.mul_"]


def test_a_plan_for_fake_tensors_is_not_compared() -> None:
    plan = plan_of("a parameter, recomputed from")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, rows = Sum(), torch.randn(ROWS.shape)
        with lowtide.apply(model, plan, say=lambda what: None):
            loss = model(rows)
            assert model.wide.bias.data.shape == model.wide.bias.shape
        loss.backward()
