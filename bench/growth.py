"""Growth of planning time for twice the layers, and of rehearsal time for four times the recurrent steps.

    python bench/growth.py                       # a frontier of 96 and 200 blocks, a rehearsal of 500 and 2,000 steps
    python bench/growth.py profile.json ...      # also the frontiers of these, each compared with the one before it

Times are processor times of this process, so that other processes disturb them less; scipy and torch are loaded before.
Limits: a frontier of 200 blocks takes at most 2.5 times as long as one of 96, and four times the steps take at most 4.5
times as long.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from torch import nn

import lowtide
from lowtide.planner.budget_frontier import frontier
from lowtide.planner.records import Profile
from planner.profiles import transformer

BLOCKS = (96, 200)
STEPS = (500, 2000)


class Recurrent(nn.Module):
    """A cell that is called once for each step; its results are dropped at once, or stacked at the end."""

    def __init__(self, cell: nn.RNNCellBase, steps: int, *, stacks: bool) -> None:
        super().__init__()
        self.cell, self.steps, self.stacks = cell, steps, stacks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        states = []
        for step in range(self.steps):
            state = self.cell(x[:, step], state)
            if self.stacks:
                states.append(state)
        return (torch.stack(states, 1) if states else state).square().mean()


def rehearsed(kind: type[nn.RNNCellBase], steps: int, *, stacks: bool, width: int = 16, rows: int = 8) -> None:
    """Rehearse one recurrent model."""
    model: Any = Recurrent(kind(width, width), steps, stacks=stacks)
    lowtide.rehearse(model, lambda batch: model(batch).backward(), torch.randn(rows, steps, width))


def table(name: str, cases: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Print a line for each case: its time, and the ratio to the case before."""
    before = 0.0
    for label, run in cases:
        began = time.process_time()
        run()
        took = time.process_time() - began
        print(f"{name:28}{label:>14}{took:9.1f} s" + (f"  x {took / before:.2f}" if before else ""), flush=True)
        before = took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", type=Path)
    profiles = parser.parse_args().profiles
    importlib.import_module("scipy.optimize")
    rehearsed(nn.RNNCell, 10, stacks=True)  # loads and sets up what is needed once
    for kind, stacks in itertools.product((nn.RNNCell, nn.GRUCell), (False, True)):
        name = f"rehearsal, {kind.__name__}" + (", stacked" if stacks else "")
        table(name, ((f"{n} steps", partial(rehearsed, kind, n, stacks=stacks)) for n in STEPS))
    table("frontier", ((f"{n} blocks", partial(frontier, transformer(n))) for n in BLOCKS))
    files = [(path.stem, Profile.from_json(path)) for path in profiles]
    table("frontier", ((stem, partial(frontier, profile)) for stem, profile in files))


if __name__ == "__main__":
    main()
