"""Unedited scripts whose loop is a framework's: the Trainer of transformers, Lightning."""

from pathlib import Path

import pytest

from conftest import RunPython

MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
network = GPT2LMHeadModel(
    GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=500, n_positions=64, bos_token_id=0, eos_token_id=0)
)
rows = torch.randint(0, 500, (20, 64)).split(1)

def say():
    print("parameters", sum(parameter.double().sum().item() for parameter in network.parameters()).hex())
"""

TRAINER = f"""{MODEL}
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    "{{out}}", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, use_cpu=True, seed=1,
    report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
)
Trainer(network, arguments, train_dataset=[dict(input_ids=row[0], labels=row[0]) for row in rows]).train()
say()
"""

LIGHTNING = f"""{MODEL}
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network
    def training_step(self, batch, number):
        return self.network(input_ids=batch, labels=batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

loader = torch.utils.data.DataLoader([row[0] for row in rows], batch_size=4)
lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir="{{out}}",
).fit(Module(), loader)
say()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "text"),
    [pytest.param("accelerate", TRAINER, id="Trainer"), pytest.param("lightning", LIGHTNING, id="Lightning")],
)
def test_a_framework_s_loop_trains_to_the_same_bits_within_a_budget(
    package: str, text: str, tmp_path: Path, run_python: RunPython
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    script = tmp_path / "train.py"
    script.write_text(text.replace("{out}", str(tmp_path / "out")), encoding="utf-8")
    plain = run_python(str(script))
    under = run_python("-m", "lowtide", "run", "--budget", "60%", str(script))
    [bits] = (line for line in plain.stdout.splitlines() if line.startswith("parameters"))
    assert bits in under.stdout.splitlines()
    assert "within the budget" in under.stderr


@pytest.mark.slow
@pytest.mark.parametrize("use_cpu", [True, False])
def test_the_trainer_is_rehearsed_for_a_gpu(use_cpu: bool, tmp_path: Path, run_python: RunPython) -> None:
    """It begins a sum of losses where the model is, and compares the device of each loss with that."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    script = tmp_path / "train.py"
    text = TRAINER.replace("use_cpu=True", f"use_cpu={use_cpu}").replace("{out}", str(tmp_path / "out"))
    script.write_text(text, encoding="utf-8")
    done = run_python("-m", "lowtide", "estimate", "--device", "L4", str(script))
    assert done.returncode == 0, done.stderr
    assert "on L4, with 22 GiB: it fits" in done.stdout
