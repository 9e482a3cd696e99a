"""Loops as they are written on a first day with other packages: within a budget, with the bits of the plain loop."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal

X, Y = torch.randn(256, 64), torch.randn(256, 64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)])


def with_a_loader(model: nn.Module) -> list[float]:
    data = torch.utils.data.TensorDataset(X, Y)
    optimizer, losses = torch.optim.AdamW(model.parameters()), list[float]()
    for _ in range(3):
        for x, y in torch.utils.data.DataLoader(data, batch_size=64, shuffle=True):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(model(X), Y).item())
        model.train()
    return losses


def with_a_grad_scaler(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), list[float]()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(X), Y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    return losses


def with_a_checkpoint_resumed(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters()), list[float]()
    saved: dict[str, Any] = {}
    for number in range(8):
        loss = nn.functional.mse_loss(model(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number == 3:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        elif number == 5:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
    return losses


def with_accelerate(model: nn.Module) -> list[float]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=32)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    losses = list[float]()
    for _ in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("loop", [with_a_loader, with_a_grad_scaler, with_a_checkpoint_resumed, with_accelerate])
def test_it_trains_to_the_same_bits_within_a_budget(loop: Callable[[nn.Module], list[float]]) -> None:
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for budget in (None, "95%"):
        model = net()
        torch.manual_seed(1)
        with nullcontext() if budget is None else lowtide.within(budget) as run:
            losses = loop(model)
        found.append((losses, model.state_dict()))
    assert run.verdict is not None
    assert run.verdict.within_budget
    (plain, weights), (under, weights_under) = found
    assert plain == under
    assert equal(weights, weights_under)


def test_lora_is_planned_for() -> None:
    peft = pytest.importorskip("peft")
    found = []
    for budget in (None, "90%"):
        model = peft.get_peft_model(net(), peft.LoraConfig(target_modules=r"\d\.[02]", r=4))
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        with nullcontext() if budget is None else lowtide.within(budget) as run:
            for _ in range(5):
                nn.functional.mse_loss(model(X), Y).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(model.state_dict())
    assert run.verdict is not None
    assert equal(*found)
