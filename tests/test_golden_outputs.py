"""The text of records, compared with files in tests/golden: a change of wording or layout shows in a diff.

Numbers, and units of time that depend on the machine, are replaced by `#`. After an intended change, write the files
again and look at the diff:

    LOWTIDE_WRITE_GOLDEN=1 pytest tests/test_golden_outputs.py && git diff tests/golden
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api.fit_result import Fitted
from lowtide.api.verify import Verdict
from report import runs

GOLDEN = Path(__file__).parent / "golden"
TIME = re.compile(r"[+-]?\d[\d.,]*(?:e[+-]?\d+)? (?:us|ms|s|min)\b")
SHARE = re.compile(r"[+-]?\d[\d.,]*(?:e[+-]?\d+)? ?%")
AMOUNT = re.compile(r"\d[\d.,]* ?(?:B|[KMG]iB)\b")
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d.,]*(?<![.,])(?:e[+-]?\d+)?(?!\w)")


def normalized(text: str) -> str:
    """Return `text` with placeholders for numbers, and without the folders of files."""
    text = re.sub(r"[^\s:]*test_golden_outputs\.py", "train.py", text)
    for pattern, placeholder in ((TIME, "# ms"), (SHARE, "# %"), (AMOUNT, "# MiB"), (NUMBER, "#")):
        text = pattern.sub(placeholder, text)
    return "".join(re.sub(r" {2,}", "  ", line).rstrip() + "\n" for line in text.splitlines())


def network() -> tuple[nn.Module, Callable[[torch.Tensor], None], torch.Tensor]:
    """Return a small model, its training step and a batch."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers, nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step, torch.randn(1024, 64)


def without_decisions(record: object) -> str:
    """Return the text of a record without the decisions, which depend on measured times."""
    text = re.sub(r"(?m)^(?:recomputed|gradients in place|  ).*\n", "", f"{record}\n")
    return re.sub(r"(?m)(\(budget [^)]*\)); .*$", r"\1; ...", text)


def infeasible() -> str:
    with pytest.raises(lowtide.Infeasible) as error:
        lowtide.plan(runs.PROFILE, 10)
    return str(error.value)


def verdict(**changes: Any) -> Verdict:
    """Return a verdict on the plan of `runs`, in which nothing differs unless `changes` say so."""
    peak_bytes = runs.PLAN.predicted.peak_bytes
    same = Verdict(
        budget_bytes=runs.PLAN.budget_bytes,
        predicted_peak_bytes=peak_bytes,
        measured_peak_bytes=peak_bytes,
        planned_ms=11.0,
        plain_ms=10.0,
        differences={"loss": (), "gradients": (), "buffers": ()},
        predicted_extra=0.08,
    )
    return replace(same, **changes)


def verdicts() -> str:
    wrong = verdict(measured_peak_bytes=runs.PLAN.budget_bytes + 1, differences={"loss": (), "gradients": ("h.0.w",)})
    unsteady = verdict(differences={"loss": (), "gradients": ("h.0.w",)}, nondeterministic={"gradients": ("h.0.w",)})
    return "\n\n".join(map(str, (verdict(), wrong, unsteady)))


def fitted() -> str:
    applied: Any = SimpleNamespace()
    return str(Fitted(applied, runs.PROFILE, replace(runs.PLAN, notes=("a note of the rehearsal",)), verdict()))


def loop() -> str:
    _, step, batch = network()
    with lowtide.within("80%", progress=False) as run:
        for _ in range(4):
            step(batch)
    return f"{without_decisions(run)}\nthe verdict alone:\n{run.verdict}"


def watched() -> str:
    model, _, batch = network()
    with lowtide.watch(model) as watch:
        for _ in range(4):
            loss = model(batch).square().mean()
            loss.backward(retain_graph=True)
    return str(watch)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("profile", lambda: str(runs.PROFILE)),
        ("plan", lambda: str(runs.PLAN)),
        ("frontier", lambda: str(runs.FRONTIER)),
        ("run_record", lambda: str(runs.run())),
        ("infeasible", infeasible),
        ("fitted", fitted),
        ("verdicts", verdicts),
        ("loop", loop),
        ("findings", watched),
    ],
)
def test_the_text_of_a_record_is_the_golden_one(name: str, text: Callable[[], str]) -> None:
    path, now = GOLDEN / f"{name}.txt", normalized(text())
    if os.environ.get("LOWTIDE_WRITE_GOLDEN") == "1":
        path.write_text(now, encoding="utf-8")
    assert now == path.read_text(encoding="utf-8")
