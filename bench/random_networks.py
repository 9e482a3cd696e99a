"""Random networks under plans: checks of their bits and of their budgets, counted outside torch.

    python bench/random_networks.py [--seeds 0:300,310] [--parts 70%,50%,35%,smallest] [--one]

Each network is drawn from its number (`networks/drawing.py`) and fitted into each part of its plain step's peak and
into its smallest budget, or with `--one` into one of them. Then three later batches, one of them smaller, run with the
plan and without. The program prints a line for each budget that was exceeded or gave other bits; the exit code is 1 if
there was any. It runs itself again under a counter of torch's allocations (`networks/meter.c`), which needs a C
compiler.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch._dynamo  # noqa: F401  which optimizers import late
from networks.drawing import draw
from networks.judging import PARTS, is_preloaded, judge, preloaded


def main() -> int:
    """Judge the networks with the given numbers, and print each fault as soon as it is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:300", help="first:stop, or one number; several with commas between them")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--one", action="store_true", help="one of the parts for each network, in turn")
    arguments = parser.parse_args()
    if not is_preloaded():
        return _run_again_with_meter()
    gc.freeze()  # recordings begin with a search of all objects that are not frozen
    atexit.register(gc.unfreeze)  # triton 3.9 names frozen objects as leaks when the process ends
    n_budgets = n_wrong = 0
    for seed in _numbers(arguments.seeds):
        drawn, parts = draw(seed), arguments.parts.split(",")
        try:
            for part, wrong in judge(drawn, (parts[seed % len(parts)],) if arguments.one else tuple(parts)):
                n_budgets += 1
                if wrong:
                    n_wrong += 1
                    print(f"{seed} {part}: {wrong}\n    {drawn}", flush=True)
        except Exception:
            n_wrong += 1
            print(f"{seed}: {traceback.format_exc()}\n    {drawn}", flush=True)
    print(f"{n_budgets} budgets, {n_wrong} not kept", flush=True)
    return int(n_wrong > 0)


def _numbers(ranges: str) -> Iterator[int]:
    for first, _, stop in (each.partition(":") for each in ranges.split(",")):
        yield from range(int(first), int(stop or int(first) + 1))


def _run_again_with_meter() -> int:
    with tempfile.TemporaryDirectory() as folder:
        if (environment := preloaded(Path(folder))) is None:
            print("no C compiler for the counter of allocations, on Linux", file=sys.stderr)
            return 2
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
