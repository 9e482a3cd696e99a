"""Step times of other models in processes in which a plan is in force, was in force, or never was.

    python bench/process.py [--rounds 200]

Three processes take turns. The first fits nothing. In the second, a plan with gradients in place is in force on a model
that is trained as well. In the third, such a plan has been removed. Each process also runs the same other models, with
operators whose gradients the plan writes in place. Times are processor times of the thread, the fastest of all turns.
torch's optimizers import its compiler, so each process imports it, too. Processes differ by some percent while others
use the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch._dynamo
from torch import Tensor, nn

import lowtide

MOST = 1.01
"""Largest allowed time of a step, as a multiple of its time in the process that fits nothing."""
WAYS = ("nothing", "in force", "removed")
AT_ONCE = 5
"""Number of steps in one turn."""


def others() -> dict[str, Callable[[], object]]:
    """Return steps of other models, by name, from very small models on."""
    torch.manual_seed(0)
    tiny = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(16, 16), nn.ReLU())))
    wide = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(256, 256), nn.GELU())), nn.LogSoftmax(-1))
    pictures = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3), nn.Softmax(1))
    given = {"tiny": (tiny, torch.randn(8, 16)), "wide": (wide, torch.randn(64, 256))}
    given["pictures"] = pictures, torch.randn(4, 3, 32, 32)
    return {name: (lambda model=model, x=x: model(x).sum().backward()) for name, (model, x) in given.items()}


def work(way: str, turns: Connection) -> None:
    """Take the turns that `turns` asks for, in one process; send the microseconds of each model's fastest step."""
    torch.set_num_threads(1)
    mine = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 2000), nn.LogSoftmax(-1))
    x = torch.randn(512, 64)

    def step(x: Tensor) -> None:
        mine(x).sum().backward()

    fitted = None
    if way != "nothing":
        fitted = lowtide.fit(mine, step, x, budget="99%")
        assert fitted.plan.in_place
        if way == "removed":
            fitted.remove()
    steps = others()
    while turns.recv():
        step(x)
        found = {}
        for name, other in steps.items():
            took = []
            for _ in range(AT_ONCE):
                began = time.thread_time()
                other()
                took.append(time.thread_time() - began)
            found[name] = min(took) * 1e6
        turns.send(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="turns of each process")
    rounds = parser.parse_args().rounds
    pipes = {}
    for way in WAYS:
        pipes[way], theirs = get_context("spawn").Pipe()
        get_context("spawn").Process(target=work, args=(way, theirs), daemon=True).start()
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for way, pipe in pipes.items():
            pipe.send(True)
            for name, took in pipe.recv().items():
                best[name, way] = min(took, best.get((name, way), took))
    for pipe in pipes.values():
        pipe.send(False)
    print(f"{'step':10}" + "".join(f"{way:>12}" for way in WAYS))
    slow = False
    for name in others():
        _, *ratios = (best[name, way] / best[name, WAYS[0]] for way in WAYS)
        slow |= max(ratios) > MOST
        print(f"{name:10}{best[name, WAYS[0]]:9.0f} us" + "".join(f"{ratio:12.3f}" for ratio in ratios))
    return int(slow)


if __name__ == "__main__":
    raise SystemExit(main())
