"""Choice of the rule where graphs come together: in lists, in sums, or within one step."""

from __future__ import annotations

import site
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4))


def batches(n: int = 6) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(64, 64), torch.randint(4, (64,))) for _ in range(n)]


def codes(watched: lowtide.Watch) -> list[str]:
    return [finding.code for finding in watched.findings]


def test_losses_of_a_criterion_that_is_called_on_the_model_s_line() -> None:
    model, criterion, losses = mlp(), nn.CrossEntropyLoss(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x, y in batches():
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            losses.append(loss)
            loss.backward(retain_graph=True)
            optimizer.step()
    assert codes(watched) == ["LT008"]


def both(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - model(x + 1)).square().mean()


def each(model: nn.Module, x: Tensor) -> Tensor:
    outputs = torch.stack([model(view) for view in (x, x + 1)])
    return outputs.diff(dim=0).square().mean()


@pytest.mark.parametrize("compare", [both, each])
def test_a_model_that_is_called_twice_in_one_step(compare: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x, _ in batches():
            optimizer.zero_grad()
            loss = compare(model, x)
            loss.backward(retain_graph=True)
            optimizer.step()
    assert codes(watched) == ["LT003"]


def test_a_sum_of_losses_that_need_no_graph_is_one_finding() -> None:
    model, criterion, total = mlp(), nn.CrossEntropyLoss(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x, y in batches():
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        for x, y in batches():
            total = total + criterion(model(x), y)
    (finding,) = watched.findings
    assert (finding.code, "'total'" in finding.holder, "no_grad" in finding.fix) == ("LT002", True, True)


def test_a_line_that_calls_a_model_twice_for_nothing_is_said_once() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            both(model, x).item()
    assert codes(watched) == ["LT002"]


def test_zero_grad_while_the_graph_of_a_validation_is_kept() -> None:
    model, kept = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for _ in range(2):
            for x, y in batches():
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            kept.append(model(x))
    assert "LT017" not in codes(watched)


@pytest.mark.parametrize(("as_kept", "expected"), [(Tensor.item, []), (Tensor.detach, ["LT021"])])
def test_losses_that_stay_in_the_memory_of_all_elements(
    as_kept: Callable[[Tensor], object], expected: list[str]
) -> None:
    model, kept = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x, _ in batches():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.repeat(100, 1)), torch.zeros(6400, 4))
            loss.backward()
            optimizer.step()
            kept.append(as_kept(loss))
            del loss
    assert codes(watched) == expected
    assert watched.findings == () or watched.findings[0].held_bytes == 6 * 4 * 6400 * 4


def test_a_loss_from_before_the_watch_is_no_average_of_weights() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = model(torch.randn(64, 64)).square().mean()
    with lowtide.watch(model) as watched:
        for x, y in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    (finding,) = watched.findings
    assert (finding.code, "tensors in `kept`" in finding.fix) == ("LT001", True)
    assert kept.grad_fn is not None


FRAMEWORK = "def update(optimizer, loss):\n    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"


def test_zero_grad_by_a_framework_is_no_finding() -> None:
    code = compile(FRAMEWORK, str(Path(site.getsitepackages()[0]) / "framework.py"), "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lowtide.watch(model) as watched:
        for x, y in batches():
            loss = nn.functional.cross_entropy(model(x), y)
            namespace["update"](optimizer, loss)
    assert codes(watched) == []
