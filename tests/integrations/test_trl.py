"""Supervised fine-tuning by TRL's trainer, with an adapter of PEFT or without: the same bits within a budget."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from comparing import equal
from lowtide.cli.demo.text_batches import END, read_python_reference, train_bpe

trl = pytest.importorskip("trl", reason="trl is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from datasets import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from lowtide.integrations.transformers import LowtideCallback  # noqa: E402

VOCAB, LENGTH = 400, 48
TEXTS = [topic[:600] for topic in read_python_reference()][:48]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    bpe = train_bpe(TEXTS, VOCAB)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)


def trained(folder: Path, tokenizer: Any, *callbacks: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=8,  # one tile of TRL's loss takes 128 KiB for each token
        num_attention_heads=4,
        vocab_size=VOCAB,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    adapter = settings.pop("peft_config", None)
    standard = dict(
        max_length=LENGTH,
        per_device_train_batch_size=8,
        max_steps=6,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config),
        trl.SFTConfig(str(folder), **{**standard, **settings}),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "settings"),
    [
        pytest.param("75%", {}, id="all parameters"),
        pytest.param("80%", {"gradient_accumulation_steps": 2}, id="accumulated"),
        pytest.param("75%", {"packing": True}, id="packed"),
        pytest.param("75%", {"peft_config": "lora"}, id="LoRA"),
    ],
)
def test_sft_trains_to_the_same_bits_within_a_budget(
    budget: str, settings: dict[str, Any], tmp_path: Path, tokenizer: Any
) -> None:
    def made() -> dict[str, Any]:
        lora = {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}
        return {**settings, **(lora if "peft_config" in settings else {})}

    callback = LowtideCallback(budget)
    plain = trained(tmp_path / "plain", tokenizer, **made())
    under = trained(tmp_path / "under", tokenizer, callback, **made())
    assert len(losses(plain)) == 6
    assert losses(under) == losses(plain)
    assert equal(under.model.state_dict(), plain.model.state_dict())
    assert callback.run is not None
    assert callback.run.verdict is not None
    assert callback.run.verdict.within_budget
    assert callback.run.plan is not None
    assert callback.run.plan.predicted.extra_ms > 0
    assert lowtide.fitted(under.model) is None
