"""Levers on an unedited script, by name on the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lowtide import cli
from lowtide.planner.records import Plan

TRAIN = """
import torch, transformers
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = dict(n_layer=2, n_embd=64, n_head=4, n_positions=32, vocab_size=2000, bos_token_id=1, eos_token_id=1)
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False)).train()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    ids = torch.randint(0, 2000, (4, 32))
    outputs = model(input_ids=ids, labels=ids)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    print(step, outputs.loss.item().hex())
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Done]:
    """The command line in this process, with the script as the last argument."""

    def command(*args: str, text: str = TRAIN) -> Done:
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        capfd.readouterr()
        return Done(cli.main([*args, str(path)]), *capfd.readouterr())

    return command


@pytest.mark.loss_head
@pytest.mark.slow
def test_a_script_with_a_lever_trains_within_less(run: Callable[..., Done], tmp_path: Path) -> None:
    saved = str(tmp_path / "plan.json")
    plain = run("run", "--budget", "100%")
    assert plain.code == 0, plain.err
    exact = run("run", "--budget", "85%", "--lever", "outputs", "--save", saved)
    assert exact.code == 0, exact.err
    assert exact.out == plain.out
    assert "lever outputs: of the model's outputs only the loss" in exact.err
    assert [lever.name for lever in Plan.from_json(saved).levers] == ["outputs"]
    assert run("run", "--plan", saved).out == plain.out
    chunked = run("run", "--budget", "95%", "--lever", "loss head", "--lever", "micro-batches=2")
    assert chunked.code == 0, chunked.err
    losses = [[float.fromhex(line.split()[1]) for line in done.out.splitlines()] for done in (plain, chunked)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # other dropout masks


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--lever", "magic", "--budget", "50%"], "there is no lever 'magic'"),
        (["--lever", "fused optimizer", "--budget", "50%"], "changes the optimizer: use lowtide.fit"),
        (["--lever", "micro-batches", "--budget", "50%"], "takes a number of pieces, as in micro-batches=4"),
        (["--lever", "micro-batches=00", "--budget", "50%"], "takes a number of pieces, as in micro-batches=4"),
        (["--lever", "micro-batches=²", "--budget", "50%"], "takes a number of pieces, as in micro-batches=4"),
        (["--lever", "outputs=3", "--budget", "50%"], "takes no number"),
        (["--lever", "outputs", "--plan", __file__], "--lever needs --budget"),
    ],
)
def test_levers_that_can_not_be_used_are_refused_before_anything_runs(
    args: list[str], says: str, run: Callable[..., Done]
) -> None:
    done = run("run", *args, text="raise SystemExit('it ran')")
    assert done.code == 2
    assert says in done.err
    assert "it ran" not in done.err


@pytest.mark.loss_head
def test_a_lever_of_no_use_ends_the_run_with_the_reason(run: Callable[..., Done]) -> None:
    only_loss = TRAIN.replace("outputs = model", "loss = model").replace("labels=ids)", "labels=None).logits.sum()")
    done = run("run", "--budget", "70%", "--lever", "loss head", text=only_loss.replace("outputs.loss", "loss"))
    assert done.code == 2
    assert "of no use here: the logits themselves are needed, by 'sum'" in done.err
