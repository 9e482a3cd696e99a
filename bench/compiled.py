"""Compare Lowtide with other ways to save memory on models whose blocks are compiled: bytes, times, bits.

    python bench/compiled.py                   # some 8 minutes on two cores; writes docs/compiled.md
    python bench/compiled.py --models llama    # prints the rows of this model alone

Each repeated block is compiled in place by inductor. The plain step, in the first row, has the same compiled blocks and
saves no memory.

- *peak*: the highest use of the CPU allocator.
- *time*: the fastest of 8 steps, divided by the fastest of 8 plain steps just before them. It varies by about 10 %.
- *bits*: loss, gradients and buffers, compared with the plain step's. In the table with dropout, `other` bits under
  `activation_memory_budget` mean wrong gradients: with a budget below 1, torch draws the random numbers again in
  backward and gets different ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from contest import allocator, tables
from contest.models import Contestant, contestant
from contest.step import Bits, Steps
from contest.ways import blocks, checkpoint_every_nth_block
from torch._functorch import config as functorch_config

import lowtide
from lowtide.report.text_table import decisions
from lowtide.runtime.static_memory import static_bytes

MODELS = ("gpt2", "gpt2-dropout", "llama")
ROUNDS = 8
"""Number of timed steps, of which the fastest counts."""
SHARES = (80, 60, 50)
"""Budgets in percent of the plain step's peak."""
AMONG, SHARES_AMONG = 0.2, (50, 40)
"""Settings for rows with both methods: the partitioner's budget, and Lowtide's budgets in percent."""


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of a step, compared with the plain step."""

    way: str
    peak_bytes: int
    ratio: float | None
    """Time of the step over the plain step's time; None for the plain step."""
    equal: bool
    what: str = ""

    def line(self, plain_bytes: int) -> str:
        """Format this row as a line of a Markdown table."""
        time = "" if self.ratio is None else f"{self.ratio:.2f} x"
        bits, share = "same" if self.equal else "other", f"{self.peak_bytes / plain_bytes:.1%}"
        return f"| {self.way} | {self.peak_bytes / 2**20:.1f} MiB | {share} | {time} | {bits} | {self.what} |"


def compiled(name: str, change: Callable[[Any], Any] = lambda model: model) -> Steps:
    """Build a model with compiled blocks, changed by `change`, and run one step, so that the blocks are compiled."""
    torch._dynamo.reset()
    made: Contestant = contestant(name)
    change(made.model)
    for block in blocks(made.model):
        block.compile()
    steps = Steps.of(made)
    steps.seconds()
    return steps


def fastest(steps: Steps) -> float:
    """Return the seconds of the fastest of ROUNDS steps."""
    return min(steps.seconds() for _ in range(ROUNDS))


def measured(steps: Steps) -> tuple[int, Bits]:
    """Measure the peak and the bits of a step that begins in the initial state."""
    static, _ = static_bytes(steps.model, steps.batch, ())
    steps.reset()
    with lowtide.measure(steps.model) as memory:
        steps.step(steps.batch)
    return static.total + memory.peak_bytes, steps.bits()


def rows(name: str) -> Iterator[Row]:
    """Measure every way to save memory on one model; yield a row for each, the plain step first."""
    plain = compiled(name)
    plain_bytes, bits = measured(plain)
    allocator.warm_up(4 * plain_bytes)
    plain_seconds = fastest(plain)  # now: compiling the next way with other settings drops this code
    yield Row("compiled blocks", plain_bytes, None, equal=True)

    def row(way: str, steps: Steps, what: str = "") -> Row:
        peak_bytes, found = measured(steps)
        return Row(way, peak_bytes, fastest(steps) / plain_seconds, same(bits, found), what)

    for n, how in ((1, "every block"), (2, "every 2nd block")):
        yield row(
            f"the same, checkpoint {how}", compiled(name, lambda model, n=n: checkpoint_every_nth_block(model, n))
        )
    for budget in (0.5, 0.2, 0.0):
        with functorch_config.patch(activation_memory_budget=budget):
            yield row(f"the same, `activation_memory_budget` {budget}", compiled(name))

    def planned(shares: Sequence[int], among: str = "") -> Iterator[Row]:
        ours = compiled(name)
        profile = lowtide.rehearse(ours.model, ours.step, ours.batch)
        for share in shares:
            with contextlib.suppress(lowtide.Infeasible):
                plan = lowtide.plan(profile, plain_bytes * share // 100)
                with lowtide.apply(ours.model, plan):
                    ours.seconds()
                    yield row(f"**Lowtide, {share} %**{among}", ours, decisions(plan))

    yield from planned(SHARES)
    with functorch_config.patch(activation_memory_budget=AMONG):
        yield from planned(SHARES_AMONG, f", with `activation_memory_budget` {AMONG}")


def same(one: Bits, other: Bits) -> bool:
    """Return True if loss, gradients and buffers are equal bit for bit."""
    pairs = ((one.gradients, other.gradients), (one.buffers, other.buffers))
    return torch.equal(one.loss, other.loss) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
    )


COLUMNS = ("| way | peak | of plain | time | bits | what was done |", "|---|---:|---:|---:|---|---|")


def section(name: str) -> Iterator[str]:
    """Yield the table of one model, line by line, as its rows are measured."""
    return tables.rows_of(contestant(name).description, COLUMNS, rows(name))


if __name__ == "__main__":
    assert __doc__ is not None
    tables.make("compiled", "Compiled blocks", __doc__, MODELS, section)
