"""The callback for the Trainer of transformers: the same bits within a budget, saved and resumed as ever."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from comparing import equal

pytest.importorskip("accelerate", reason="accelerate is not installed, which the Trainer runs on")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lowtide.integrations.transformers import LowtideCallback

ROWS = torch.randint(0, 500, (24, 64), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def trainer(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0)
    standard = dict(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=5,
        use_cpu=True,
        seed=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    arguments = TrainingArguments(str(folder), **{**standard, **settings})
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=DATA, callbacks=list(callbacks))


def trained(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    made = trainer(folder, *callbacks, **settings)
    made.train()
    return made


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


@pytest.fixture(autouse=True)
def _nothing_is_left_over() -> Iterator[None]:
    before = nn.Module.__call__
    yield
    assert nn.Module.__call__ is before


def test_it_trains_to_the_same_bits_within_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = LowtideCallback("70%")
    under, plain = trained(tmp_path, callback), trained(tmp_path)
    assert losses(under) == losses(plain)
    assert equal(under.model.state_dict(), plain.model.state_dict())
    run = callback.run
    assert run is not None
    assert run.verdict is not None
    assert run.verdict.within_budget
    assert run.verdict.is_of_planned_size
    assert lowtide.fitted(under.model) is None
    assert not any("_compiled_call_impl" in module.__dict__ for module in under.model.modules())
    *_, last, _ = under.state.log_history
    assert last["lowtide_peak_bytes"] == run.verdict.measured_peak_bytes
    assert last["lowtide_budget_bytes"] == run.verdict.budget_bytes
    assert "was given" not in capsys.readouterr().err  # a count of tokens comes with the batch, and is no size


@pytest.mark.slow
def test_saving_and_resuming_are_as_ever(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", max_steps=8)
    plain.train()
    first = trainer(tmp_path / "one", LowtideCallback("70%"), max_steps=8, save_strategy="steps", save_steps=4)
    first.train()
    saved = tmp_path / "one" / "checkpoint-4"
    assert not [name for name in (*first.model.state_dict(),) if "lowtide" in name]
    shutil.copytree(saved, tmp_path / "two" / "checkpoint-4")
    second = trainer(tmp_path / "two", LowtideCallback("70%"), max_steps=8)
    second.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-4"))
    for each in (first, second):
        assert equal(each.model.state_dict(), plain.model.state_dict())


def test_where_nothing_fits_the_error_comes_out_of_train(tmp_path: Path) -> None:
    under = trainer(tmp_path, LowtideCallback("1MB"))
    with pytest.raises(lowtide.Infeasible, match="no plan fits"):
        under.train()
    assert lowtide.fitted(under.model) is None
    with lowtide.within("80%"):  # nothing is in the way of what comes next
        pass


class Stop(TrainerCallback):
    """Ends training with an exception, that no callback is notified of."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            raise KeyError("mine")


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("how", ["close", "another block", "training anew"])
def test_after_an_exception_the_model_is_given_back(how: str, tmp_path: Path) -> None:
    callback = LowtideCallback("70%")
    under = trainer(tmp_path, callback, Stop())
    with pytest.raises(KeyError):
        under.train()
    assert lowtide.fitted(under.model) is not None
    if how == "close":
        callback.close()
    elif how == "another block":
        with lowtide.within("80%"):
            assert lowtide.fitted(under.model) is None
    else:
        under.remove_callback(Stop)
        under.train()
    assert lowtide.fitted(under.model) is None


def test_checkpointing_of_the_trainers_own_is_said_with_what_there_is_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, max_steps=8)
    callback = LowtideCallback("95%", on_infeasible="smallest")
    under, plain = trained(tmp_path, callback, **settings), trained(tmp_path, **settings)
    assert equal(under.model.state_dict(), plain.model.state_dict())
    assert "checkpoint" in capsys.readouterr().err


def test_an_invalid_budget_is_refused_where_the_callback_is_made() -> None:
    with pytest.raises(lowtide.BudgetError):
        LowtideCallback("8G")


def test_deepspeed_is_refused_by_its_name(tmp_path: Path) -> None:
    under = trainer(tmp_path, LowtideCallback("70%"))
    under.args.deepspeed = {"zero_optimization": {"stage": 2}}
    with pytest.raises(lowtide.LowtideError, match="DeepSpeed"):
        under.callback_handler.on_train_begin(under.args, under.state, under.control)
