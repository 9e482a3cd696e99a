"""Models of unusual kinds in `rehearse` and `fit`: planned for, or refused by what keeps plans out."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import lowtide
from lowtide.errors import RehearsalError
from lowtide.memory.lbfgs_history import predict_missing_history_bytes

X = torch.randn(400, 16)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


class Own(nn.Module):
    """A class whose `__call__` runs the forward by itself."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.forward(*inputs)


class Network(Own):
    """Saves tensors itself and in a part of its own kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(16, 16)), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(torch.tanh(x @ self.weight) * 2))


class Onward(Own):
    """Goes on to torch's `__call__` after all."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        return nn.Module.__call__(self, *inputs)

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return step


def test_a_class_with_its_own_call_has_a_plan() -> None:
    model = Network(Network(net()))
    own, step = Own.__call__, step_of(model)
    loss = step(X)
    gradients = [p.grad for p in model.parameters()]
    fitted = lowtide.fit(model, step, X, budget="90%")
    assert fitted.verdict.proven
    assert {"#0:1", "inner#0:1"} <= {slot.address for slot in fitted.profile.slots}
    assert torch.equal(step(X), loss)
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), gradients, strict=True))
    other = copy.deepcopy(model)
    assert torch.equal(step_of(other)(X), loss)
    fitted.remove()
    assert Own.__call__ is own


def test_a_call_that_goes_on_to_torchs_is_seen_once() -> None:
    model = nn.Sequential(Onward(), net())
    profile = lowtide.rehearse(model, step_of(model), X)
    assert [call.id for call in profile.calls if call.id.startswith("0")] == ["0#0"]


def by_func(model: nn.Module) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        found = grad(lambda p: functional_call(model, p, (x,)).square().mean())(dict(model.named_parameters()))
        for name, p in model.named_parameters():
            p.grad = found[name].detach()

    return step


def by_row(model: nn.Module) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        one = grad(lambda p, row: functional_call(model, p, (row,)).square().mean())
        found = vmap(one, in_dims=(None, 0))(dict(model.named_parameters()), x)
        for name, p in model.named_parameters():
            p.grad = found[name].detach().mean(0)

    return step


def on_the_host(model: nn.Module) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> None:
        model.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().mean()
        loss.backward()

    return step


@pytest.mark.parametrize(
    ("kind", "names"), [(by_func, "torch.func"), (by_row, "torch.func"), (on_the_host, "save_on_cpu")]
)
def test_the_reason_why_plans_have_no_effect_is_named(
    kind: Callable[[nn.Module], Callable[[Tensor], Any]], names: str
) -> None:
    model = net()
    for go in (lowtide.rehearse, lambda *given: lowtide.fit(*given, budget="50%")):
        with pytest.raises(RehearsalError, match=names):
            go(model, kind(model), X)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("whole", [lambda m: torch.jit.script(m), lambda m: nn.Sequential(torch.jit.trace(m, X))])
def test_torchscript_as_a_whole_is_refused(whole: Callable[[nn.Module], nn.Module]) -> None:
    model = whole(net())
    with pytest.raises(RehearsalError, match=r"torch\.jit\.script"):
        lowtide.rehearse(model, step_of(model), X)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_the_history_of_l_bfgs_counts_from_the_beginning(search: str | None) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, max_iter=3, line_search_fn=search)

    def step(x: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    n_bytes = sum(p.nbytes for p in model.parameters())
    most = predict_missing_history_bytes(optimizer)
    assert most == n_bytes * (2 * 4 + (9 if search else 4)) + 2 * 4 * 4
    profile = lowtide.rehearse(model, step, X)
    assert profile.static.optimizer >= most
    for _ in range(3):
        step(X)
    kept = [t for entry in optimizer.state.values() for pair in ("old_dirs", "old_stps") for t in entry[pair]]
    assert sum(t.nbytes for t in kept) == 2 * 4 * n_bytes
    assert predict_missing_history_bytes(optimizer) <= most - 2 * 4 * n_bytes
