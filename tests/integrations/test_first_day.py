"""Loops as they are written on a first day: each within its budget from its first step on, with the plain loop's bits.

What a loop needs is taken from the allocator's events: those of the steps that are rehearsed or measured, which are
recorded there, and those of all steps after these, optimizers and evaluation included. Where lengths vary, a long batch
may be rehearsed after the optimizer has made its state: that step needs as much as the plain one, and is left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import lowtide
from comparing import equal
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.memory_timeline import Timeline

Trained = tuple[list[float], nn.Module]


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets, made by each loop for itself: what was there before would not count as in memory."""
    one = torch.Generator().manual_seed(0)
    return torch.randn(256, 64, generator=one), torch.randn(256, 64, generator=one)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)])


def with_a_loader(folder: Path) -> Trained:
    model, losses = net(), list[float]()
    rows = torch.utils.data.TensorDataset(*data())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for x, y in torch.utils.data.DataLoader(rows, batch_size=64, shuffle=True):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def with_evaluation_between_epochs(folder: Path) -> Trained:
    model, losses = net(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [*zip(*(part.split(128) for part in data()), strict=True)]
    for _ in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses.extend(nn.functional.mse_loss(model(x), y).item() for x, y in batches)
        model.train()
    return losses, model


def with_a_grad_scaler(folder: Path) -> Trained:
    (x, y), model, losses = data(), net(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
    return losses, model


def with_accumulation_by_hand(folder: Path) -> Trained:
    model, losses = net(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [*zip(*(part.split(64) for part in data()), strict=True)]
    for number in range(20):
        x, y = batches[number % 4]
        loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
        losses.append(loss.item())
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def with_varying_lengths(folder: Path) -> Trained:
    model, losses = net(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters())
    rows = data()[0].view(16, 16, 64)
    for length in (7, 12, 16, 9, 16, 5, 16, 11, 14, 16, 3, 16):
        x = rows[:, :length]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def with_a_checkpoint_resumed(folder: Path) -> Trained:
    (x, y), model, losses = data(), net(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(n_steps: int) -> None:
        for _ in range(n_steps):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    if not (folder / "saved.pt").exists():  # the first run is ended early
        train(3)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")
        losses.clear()
    saved = torch.load(folder / "saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    del saved
    train(6)
    return losses, model


def with_accelerate(folder: Path) -> Trained:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    rows = torch.utils.data.TensorDataset(*(part.repeat(2, 1) for part in data()))
    loader = torch.utils.data.DataLoader(rows, batch_size=64)
    model, losses = net(), list[float]()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model


def with_the_trainer(folder: Path) -> Trained:
    pytest.importorskip("accelerate")
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, vocab_size=100
    )
    rows = [{"input_ids": ids, "labels": 0} for ids in torch.randint(0, 100, (24, 64))]
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=6,
        use_cpu=True,
        seed=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.model


def with_lightning(folder: Path) -> Trained:
    lightning = pytest.importorskip("lightning")
    losses = list[float]()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            x, y = batch
            losses.append(nn.functional.mse_loss(self.net(x), y).item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=64)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, loader, loader)
    return losses, module


def with_lora(folder: Path) -> Trained:
    peft = pytest.importorskip("peft")
    (x, y), losses = data(), list[float]()
    model = peft.get_peft_model(net(), peft.LoraConfig(target_modules=r"\d\.[02]", r=4))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for _ in range(6):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class Peaks:
    """Peaks of all that the allocator held, by its events, in parts that follow each other."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._open: list[CpuRecorder] = []

    def add(self, recorder: CpuRecorder) -> None:
        self.found.append(sum(recorder.entry_bytes.values()) + Timeline(recorder.stream).peak_bytes)

    def record(self) -> None:
        """Record from now on, until `close`."""
        self._open.append(CpuRecorder())
        self._open[-1].__enter__()

    def close(self) -> None:
        while self._open:
            self._open.pop().__exit__(None, None, None)

    @contextmanager
    def of_recorders(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Add the peak of each recording that is made in this block, by whom it may be."""
        ends = CpuRecorder.__exit__

        def end(recorder: CpuRecorder, *error: Any) -> None:
            ends(recorder, *error)
            self.add(recorder)

        with monkeypatch.context() as patch:
            patch.setattr(CpuRecorder, "__exit__", end)
            try:
                yield
            finally:
                self.close()


LOOPS: dict[Callable[[Path], Trained], str] = {
    with_a_loader: "90%",
    with_evaluation_between_epochs: "90%",
    with_a_grad_scaler: "90%",
    with_accumulation_by_hand: "95%",
    with_varying_lengths: "90%",
    with_a_checkpoint_resumed: "90%",
    with_accelerate: "95%",
    with_the_trainer: "80%",
    with_lightning: "90%",
    with_lora: "90%",
}


SLOW = {with_varying_lengths, with_the_trainer, with_lightning}


@pytest.mark.parametrize(
    "loop", [pytest.param(loop, marks=[pytest.mark.slow] if loop in SLOW else []) for loop in LOOPS]
)
def test_it_trains_to_the_same_bits_within_its_budget(
    loop: Callable[[Path], Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, under = Peaks(), Peaks()
    torch.manual_seed(1)
    with plain.of_recorders(monkeypatch):
        plain.record()
        losses, model = loop(tmp_path)
    torch.save(model.state_dict(), tmp_path / "plain.pt")  # not in memory, where it would count
    del model
    torch.manual_seed(1)
    with under.of_recorders(monkeypatch), lowtide.within(LOOPS[loop]) as run:

        def updated(*_: Any) -> None:
            if run.verdict is not None and not under._open:
                under.record()

        hook = register_optimizer_step_post_hook(updated)
        losses_under, model = loop(tmp_path)
        under.close()
        hook.remove()
    assert losses == losses_under
    assert equal(torch.load(tmp_path / "plain.pt"), model.state_dict())
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert len(under.found) > 3, "the rehearsed steps, the measured one and those after it"
    counted = under.found[-2:] if loop is with_varying_lengths else under.found
    assert max(counted) <= run.verdict.budget_bytes < max(plain.found), (under.found, plain.found)
