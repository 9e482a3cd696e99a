"""The callback for the Trainer of Lightning: the same bits within a budget, and the module as it was after."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from comparing import equal

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from lowtide.integrations.lightning import LowtideCallback  # noqa: E402

ROWS = [torch.randn(64, generator=torch.Generator().manual_seed(n)) for n in range(512)]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))


class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(*[block() for _ in range(4)])
        self.losses: list[float] = []
        self._fails_at = fails_at

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        if number == self._fails_at:
            raise KeyError("mine")
        loss: Tensor = (self.net(batch) - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train(folder: Path, module: Net, *callbacks: Any, **settings: Any) -> Any:
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=list(callbacks),
        **settings,
    )
    torch.manual_seed(1)
    trainer.fit(module, torch.utils.data.DataLoader(ROWS, batch_size=64))
    return trainer


def made(**settings: Any) -> Net:
    torch.manual_seed(0)
    return Net(**settings)


@pytest.mark.parametrize("n_accumulated", [1, 2])
def test_it_trains_to_the_same_bits_within_a_budget(n_accumulated: int, tmp_path: Path) -> None:
    callback, under, plain = LowtideCallback("85%"), made(), made()
    trainer = train(tmp_path, under, callback, accumulate_grad_batches=n_accumulated)
    train(tmp_path, plain, accumulate_grad_batches=n_accumulated)
    assert under.losses == plain.losses
    assert equal(under.state_dict(), plain.state_dict())
    assert callback.run is not None
    assert callback.run.verdict is not None
    assert callback.run.verdict.within_budget
    assert trainer.callback_metrics["lowtide_peak_bytes"] == callback.run.verdict.measured_peak_bytes
    assert lowtide.fitted(under) is None


def test_within_around_it_does_the_same(tmp_path: Path) -> None:
    under, plain = made(), made()
    with lowtide.within("85%") as run:
        train(tmp_path, under)
    train(tmp_path, plain)
    assert equal(under.state_dict(), plain.state_dict())
    assert run.verdict is not None


def test_after_an_exception_the_module_is_as_it_was(tmp_path: Path) -> None:
    under = made(fails_at=5)
    with pytest.raises(KeyError):
        train(tmp_path, under, LowtideCallback("85%"))
    assert lowtide.fitted(under) is None
    assert not any("_compiled_call_impl" in module.__dict__ for module in under.modules())


def test_where_nothing_fits_the_error_comes_out_of_fit(tmp_path: Path) -> None:
    with pytest.raises(lowtide.Infeasible):
        train(tmp_path, made(), LowtideCallback("1MB"))
