"""Time of planning, and distance of plans from their bound: milliseconds, and percent of the bound.

    python bench/planning.py                     # transformers of 12 and 100 blocks, 12 saved tensors a block
    python bench/planning.py --real              # also GPT-2, BERT, Llama and ResNet, rehearsed at small sizes
    python bench/planning.py --compiled 12 48    # instead, GPT-2 of 12 and of 48 blocks, compiled as a whole
    python bench/planning.py profile.json ...    # profiles that `profile.to_json(path)` wrote

Each budget is planned three times, each time from a fresh copy of the profile, so that no earlier result is reused; the
fastest time is printed, because other processes disturb a shared processor. Budgets are given as parts of the way from
the smallest peak of any plan to the plain peak. The gap is the plan's extra time beyond the printed bound; close to the
smallest peak it is wide, because the bound leaves out scratch memory. scipy is loaded before, because otherwise the
first plan of a process would take 0.3 s longer. Compiled models are rehearsed without inductor's kernels, which do not
change plans; the time is that of planning alone.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from lowtide.planner import find_smallest_peak, plan, predict
from lowtide.planner.records import Decisions, Profile
from planner.profiles import transformer

PARTS = (10, 25, 40, 55, 70, 85)
"""Budgets in percent of the way from the smallest peak to the plain peak."""
TIMES = 3
"""Number of times that each budget is planned."""


def rehearsed() -> Iterator[tuple[str, Profile]]:
    """Rehearse real models at the sizes of the tests; yield the name and the profile of each."""
    import models
    from lowtide.profiler import rehearse

    for name in models.MODELS:
        case = models.build(name)
        yield name, rehearse(case.model, case.step, case.batch, optimizer=case.optimizer)


def rehearse_compiled(n_blocks: int) -> Profile:
    """Rehearse a GPT-2 of `n_blocks` blocks, with dropout, that is compiled as a whole."""
    import torch
    from contest import by_hand
    from torch import nn

    from lowtide._torch.inductor import kernels_left_out
    from lowtide.profiler import rehearse

    torch.manual_seed(0)
    made = by_hand.gpt2(0.1)
    made.model.h = nn.ModuleList(by_hand.GPT2Block(0.1) for _ in range(n_blocks))
    compiled: Any = torch.compile(made.model)
    with kernels_left_out():
        return rehearse(compiled, lambda batch: compiled(**batch).loss.backward(), made.batch)


def rows(name: str, profile: Profile) -> Iterator[str]:
    """Yield a line for each budget: planning time, extra time, and gap to the bound."""
    low, high = find_smallest_peak(profile)[1].peak_bytes, predict(profile, Decisions()).peak_bytes
    for part in PARTS:
        took_ms = math.inf
        for _ in range(TIMES):
            fresh = replace(profile)
            began = time.perf_counter()
            made = plan(fresh, low + (high - low) * part // 100)
            took_ms = min(took_ms, (time.perf_counter() - began) * 1000)
        gap = f"{100 * (made.predicted.extra_ms / made.bound_ms - 1):8.1f} %" if made.bound_ms else "       -  "
        extra = f"{100 * made.predicted.extra_ms / made.step_ms:+8.2f} %" if made.step_ms else "       -  "
        yield f"{name:24}{100 * made.budget_bytes / high:8.1f} %{took_ms:9.0f} ms{extra:>12}{gap:>12}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", type=Path)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--compiled", type=int, nargs="+", metavar="BLOCKS", default=())
    asked = parser.parse_args()
    importlib.import_module("scipy.optimize")
    print(f"{'profile':24}{'budget':>10}{'planning':>12}{'extra time':>12}{'over bound':>12}")
    named = [(path.stem, Profile.from_json(path)) for path in asked.profiles]
    named += [(f"compiled, {n} blocks", rehearse_compiled(n)) for n in asked.compiled]
    for name, profile in named or [(f"{n} blocks", transformer(n)) for n in (12, 100)]:
        print(*rows(name, profile), sep="\n", flush=True)
    for name, profile in rehearsed() if asked.real else ():
        print(*rows(name, profile), sep="\n", flush=True)


if __name__ == "__main__":
    main()
