"""Cost of a kept reference: bytes held at the next forward, and the part of the step's peak that dropping it saves.

    python bench/retention.py [--write]

An MLP of 8 layers x 512 with 2,048 rows: each activation is 4 MiB, the graph of a forward 32 MiB, the parameters 8 MiB
and their gradients, which each step creates, as much again. All numbers are requested bytes of torch's allocator,
measured by `lowtide.measure` on CPU. `held` counts the bytes that are freed when the reference is dropped between two
steps. `peak` is the highest level of a step, with parameters, gradients and the batch, while the reference of the step
before is still held; next to it is the peak with the reference dropped. The last two rows are a GPT-2 of 6 layers x 384
with 50,257 words on 4 x 128 tokens, whose outputs are dropped between forward and backward. `--write` puts the table
into docs/retention.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.units import format_bytes, format_ratio

ROWS, WIDTH, LAYERS = 2048, 512, 8
TOKENS = 4, 128
PAGE = Path(__file__).parents[1] / "docs" / "retention.md"


def mlp() -> nn.Sequential:
    """Build an MLP in which each layer saves one activation: its ReLU's result, the next layer's input."""
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


class Setting:
    """Models and a batch in the middle of training. Gradients are None at the start of each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.teacher = mlp(), mlp()
        self.x = torch.randn(ROWS, WIDTH)
        self.kept: dict[str, Any] = {}
        self.drops = False
        """True if the step drops what it need not keep."""

    def loss(self) -> Tensor:
        return self.model(self.x).square().mean()


class LanguageSetting(Setting):
    """A GPT-2 in the middle of training, whose logits are large compared with its activations."""

    checkpoints = False

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(n_layer=6, n_embd=384, n_head=6, n_positions=TOKENS[1], use_cache=False)
        self.model, self.teacher = GPT2LMHeadModel(config), nn.Sequential()
        self.x = torch.randint(0, config.vocab_size, TOKENS)
        if self.checkpoints:
            self.model.activation_checkpointing_enable()


class CheckpointedSetting(LanguageSetting):
    """A GPT-2 in the middle of training, with a checkpoint around each block."""

    checkpoints = True


class ReLUOnContext(torch.autograd.Function):
    """ReLU that keeps its argument as an attribute of ctx, which backward does not free."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (ctx.x > 0)


def ordinary(at: Setting) -> None:
    # Like `loss = criterion(...)` in a loop: the assignment frees the loss of the step before, after this forward.
    at.kept["loss"] = at.loss()
    at.kept["loss"].backward()


def total(at: Setting) -> None:
    loss = at.loss()
    loss.backward()
    at.kept["total"] = at.kept.get("total", 0) + loss


def skipped(at: Setting) -> None:
    at.kept["loss"] = at.loss()


def retained(at: Setting) -> None:
    at.kept["loss"] = at.loss()
    at.kept["loss"].backward(retain_graph=True)


def partial(at: Setting) -> None:
    at.kept["loss"] = at.loss()
    at.kept["loss"].backward(inputs=list(at.model[-2].parameters()))


def teacher(at: Setting) -> None:
    target = at.teacher(at.x)
    loss = F.mse_loss(at.model(at.x), target.detach())
    loss.backward()
    at.kept["target"] = target


def context(at: Setting) -> None:
    hidden = at.x
    for linear in at.model[::2]:
        hidden = ReLUOnContext.apply(linear(hidden))
    at.kept["loss"] = hidden.square().mean()
    del hidden
    at.kept["loss"].backward()


def carried(at: Setting) -> None:
    before = at.kept.get("state", at.x)
    state = at.model[0](before).tanh()
    state.square().mean().backward(retain_graph=True)
    at.kept["state"] = state


def output(at: Setting) -> None:
    result = at.model(at.x)
    result.square().mean().backward()
    at.kept["output"] = result.detach()


def view(at: Setting) -> None:
    result = at.model(at.x)
    result.square().mean().backward()
    at.kept["last"] = result[:, -1].detach()


def outputs(at: Setting) -> None:
    given = at.model(input_ids=at.x, labels=at.x)
    loss, at.kept["logits"] = given.loss, given.logits
    del given
    if at.drops:
        at.kept.clear()
    loss.backward()


@dataclass(frozen=True)
class Case:
    """A row of the table: a step that keeps a reference, and the remedy."""

    name: str
    step: Callable[[Setting], None]
    helps: str
    setting: type[Setting] = Setting


LOSS_ONLY = "`loss = model(...).loss`; `lowtide.loss_only`"

NODES = "nothing to gain on the device; host memory for each node ([below](#when-it-does-not)): `.detach()`"

CASES = (
    Case("ordinary loop, `loss` kept after backward", ordinary, "nothing to gain"),
    Case(
        "`total += loss` after backward",
        total,
        NODES,
    ),
    Case("backward skipped, or evaluation without `no_grad`", skipped, "`del loss`; `torch.no_grad()`"),
    Case("`retain_graph=True`", retained, "`del loss`; no `retain_graph`"),
    Case("`backward(inputs=...)` of the last layer", partial, "`del loss`"),
    Case("teacher forward without `no_grad`, its output kept", teacher, "`torch.no_grad()`; `del target`"),
    Case("`ctx.x = tensor` in a custom Function, in each layer", context, "`ctx.save_for_backward`; `del loss`"),
    Case("recurrent state carried with `retain_graph`", carried, "`state.detach()`"),
    Case("output kept, `.detach()` or not", output, "`del output`"),
    Case("`output[:, -1].detach()` kept", view, "`.clone()` of the slice"),
    Case("GPT-2: `outputs` kept through backward", outputs, LOSS_ONLY, LanguageSetting),
    Case("the same with a checkpoint around each block", outputs, LOSS_ONLY, CheckpointedSetting),
)


@dataclass(frozen=True)
class Row:
    """Costs of one case, in bytes."""

    case: Case
    held_bytes: int
    grows_bytes: int
    peak_bytes: int
    dropped_peak_bytes: int

    @property
    def share(self) -> float:
        """Share of the peak that dropping the reference saves."""
        return 1 - self.dropped_peak_bytes / self.peak_bytes


def measured(case: Case) -> Row:
    """Measure three steps that keep the reference, then three steps that drop it."""
    held, peaks = [], []
    for drops in (False, True):
        at = case.setting()
        at.drops = drops
        standing = at.x.nbytes + sum(p.nbytes for p in at.model.parameters())
        standing += sum(p.nbytes for p in at.teacher.parameters()) if case.step is teacher else 0
        for _ in range(3):
            if drops:
                at.kept.clear()
            at.model.zero_grad()
            alive = level(at)
            with lowtide.measure() as memory:
                case.step(at)
            if not drops:
                held.append(level(at))
        peaks.append(standing + alive + memory.peak_bytes)
        at.kept.clear()
    return Row(case, held[-1], held[-1] - held[-2], *peaks)


def level(at: Setting) -> int:
    """Compute the bytes that the kept references hold, and that dropping them would free."""
    from lowtide.diagnostics.leaks.live_tensors import storage_bytes
    from lowtide.diagnostics.leaks.tensor_graphs import collect_computing_nodes, map_kept_bytes

    known = {t.untyped_storage()._cdata for m in (at.model, at.teacher) for t in m.parameters()}
    known.add(at.x.untyped_storage()._cdata)
    alive: dict[int, int] = {}
    for tensor in at.kept.values():
        alive[tensor.untyped_storage()._cdata] = storage_bytes(tensor)
        if tensor.grad_fn is not None:
            saved, on_context = map_kept_bytes(collect_computing_nodes([tensor.grad_fn]))
            alive |= saved | on_context
    return sum(n_bytes for number, n_bytes in alive.items() if number not in known)


def freed(case: Case) -> int:
    """Measure the bytes that the allocator frees when the references are dropped after three steps."""
    at = case.setting()
    for _ in range(3):
        case.step(at)
    with lowtide.measure() as memory:
        at.kept.clear()
    return -memory.timeline.curve[-1] if memory.timeline.curve else 0


def checked(case: Case) -> Row:
    """Measure a case, and return its row if both ways to find the held bytes agree; exit otherwise."""
    row, seen = measured(case), freed(case)
    if seen != row.held_bytes:
        raise SystemExit(f"{case.name}: the graph says {row.held_bytes} B, the allocator {seen} B")
    return row


def table(rows: list[Row]) -> str:
    lines = ["| case | held at the next forward | peak of a step | with it dropped | saves | what helps |"]
    lines.append("|---|---:|---:|---:|---:|---|")
    for row in rows:
        grows = f", +{format_bytes(row.grows_bytes)} a step" if row.grows_bytes > 1024 else ""
        cells = (
            row.case.name,
            format_bytes(row.held_bytes) + grows,
            format_bytes(row.peak_bytes),
            format_bytes(row.dropped_peak_bytes),
            format_ratio(row.share),
            row.case.helps,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put the table into docs/retention.md")
    asked = parser.parse_args()
    text = table([checked(case) for case in CASES])
    print(text)
    if asked.write:
        page = PAGE.read_text(encoding="utf-8")
        marks = "<!-- table: bench/retention.py -->\n", "\n<!-- end -->"
        pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        PAGE.write_text(re.sub(pattern, lambda _: text.join(marks), page, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
