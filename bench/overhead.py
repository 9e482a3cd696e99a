"""Measure the host time of a plan: a saved tensor, a module call, a replay, and whole models with tiny tensors.

    python bench/overhead.py          # microseconds a saved tensor and a call, beyond the operators that run again
    python bench/overhead.py models   # steps of ResNet-50's and GPT-2's structure, and their Python calls
    python bench/overhead.py within   # steps in a block of `lowtide.within` that has nothing to plan for
    python bench/overhead.py within demo   # the same for the demo's step alone

Each row of the first table is a time per tensor or call: the time that the plan adds to a whole step, less the time of
the operators that the plan runs again. The models are rehearsed with larger tensors, planned for 75 % of their plain
peak, and then run with tiny tensors under the same decisions. Times are processor times of one thread, minima of
interleaved runs, so that a busy machine changes little.

The first row of the first table measures Python hooks that only detach a tensor and return it. It shows how fast the
machine is: 0.6 us on the machine that the limits were written for. LOWTIDE_NATIVE=0 measures Lowtide's hooks in Python,
LOWTIDE_NATIVE=1 its compiled ones.

In the third table the budget is above the plain step's peak, or no plan fits and training continues without a plan.
Steps in the block and outside it take turns; the table also has the Python calls that the block adds to a step.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from math import inf
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lowtide
from lowtide.planner.address_nodes import NOTED
from lowtide.runtime import bitmask, saved_values
from lowtide.runtime.engine import Engine
from lowtide.runtime.plan_table import parse_actions
from lowtide.script import later_steps

COUNT = 200
"""Number of tensors or calls in one step."""

FOUR = torch.full((4,), 0.5, requires_grad=True)


class Chain(nn.Module):
    """A chain of operators, each of which saves one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(COUNT):
            x = x.tanh()
        return x


class Numbers(nn.Module):
    """A chain of additions of a number, whose results are saved."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(COUNT):
            x = (x + 0.5).sin()
        return x


class Calls(nn.Module):
    """A chain of modules."""

    def __init__(self, part: Callable[[], nn.Module], count: int = COUNT) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Short(nn.Module):
    """A module to replay: two operators that save three tensors, one of which is the argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * x.tanh()


RUNS = 30
ROUNDS = 3
"""Number of blocks of `within` that take turns with steps outside them."""
WARM_UP = 88
"""Number of steps in which a block of `within` settles, waits for other models or times included. In the next two steps
the block neither measures a step nor counts tensors.
"""

SHARE = 0.75
"""Budget of the models, as a share of the plain peak."""


def interleaved(step: Callable[[], object], engines: dict[str, Engine | None], runs: int = RUNS) -> dict[str, float]:
    """Measure microseconds of the fastest step under each engine, and without one."""
    fastest = dict.fromkeys(engines, float("inf"))
    for _ in range(runs):
        for name, engine in engines.items():
            if engine is not None:
                engine.install()
            step()
            for _ in range(3):
                began = time.thread_time()
                step()
                fastest[name] = min(fastest[name], time.thread_time() - began)
            if engine is not None:
                engine.remove()
        gc.collect(0)
    return {name: seconds * 1e6 for name, seconds in fastest.items()}


def measure_own_time(operators: Callable[[], object]) -> float:
    """Measure microseconds of operators by themselves, called from Python without gradients."""
    with torch.no_grad():
        return interleaved(lambda: [operators() for _ in range(COUNT)], {"": None})[""] / COUNT


def extra(model: nn.Module, recompute: dict[str, str], replay: list[str], n_slots: int) -> float:
    """Measure the microseconds that a plan adds to a step, for each of `n_slots` tensors or calls."""

    def step() -> None:
        model(FOUR).sum().backward()

    times = interleaved(step, {"plain": None, "planned": Engine(model.train(), parse_actions(recompute, replay))})
    return (times["planned"] - times["plain"]) / n_slots


def measure_idle_hooks() -> float:
    """Measure the microseconds per saved tensor of Python hooks that do nothing: a yardstick of the machine."""
    model = Chain()

    def step() -> None:
        model(FOUR).sum().backward()

    def hooked() -> None:
        with saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            loss = model(FOUR).sum()
        loss.backward()

    plain_us = hooked_us = float("inf")
    for _ in range(3):
        plain_us = min(plain_us, interleaved(step, {"": None}, RUNS // 3)[""])
        hooked_us = min(hooked_us, interleaved(hooked, {"": None}, RUNS // 3)[""])
    return (hooked_us - plain_us) / COUNT


def slots() -> None:
    """Print the costs of a saved tensor and of a call."""
    one = FOUR.detach()
    tanh, both = measure_own_time(one.tanh), measure_own_time(lambda: one.sin() + 0.5)
    short = measure_own_time(lambda: one.sin() * one.tanh())
    all_recomputed = {f"#0:{n}": "TanhBackward0" for n in range(1, COUNT)}
    all_noted = {f"#0:{n}": f"AddBackward0{NOTED}" for n in range(1, COUNT)}
    decided = {"#0:100": "TanhBackward0"}
    rows = [
        ("hooks that do nothing", measure_idle_hooks(), None),
        ("kept, nothing is decided", extra(Chain(), {}, [], COUNT), None),
        ("kept beside a decided one", extra(Chain(), decided, [], COUNT), 1.2),
        ("recomputed", extra(Chain(), all_recomputed, [], COUNT) - tanh, 4),
        ("recomputed with a number", extra(Numbers(), all_noted, [], COUNT) - both, 15),
        ("a module call", extra(Calls(nn.Identity), {}, [], COUNT), None),
        (
            "a replayed call",
            extra(Calls(Short), {}, [f"parts.{n}#0" for n in range(COUNT)], COUNT) - short,
            40,
        ),
    ]
    print(f"{'what':30} {'us':>7} {'at most':>8}")
    for what, found, limit in rows:
        print(f"{what:30} {found:7.2f} {limit if limit is not None else '':>8}")


def resnet(*, tiny: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = {"embedding_size": 4, "hidden_sizes": [8] * 4} if tiny else {"hidden_sizes": [32, 64, 128, 256]}
    model = ResNetForImageClassification(ResNetConfig(num_labels=10, **widths))
    rows, size = (2, 32) if tiny else (16, 96)
    return model, {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(10, (rows,))}


def gpt2(*, tiny: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, rows, length = (24, 1, 8) if tiny else (96, 8, 128)
    config = GPT2Config(use_cache=False, attn_pdrop=0.0, n_embd=width, vocab_size=1024, n_positions=length)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 1024, (rows, length))
    return model, {"input_ids": ids, "labels": ids.clone()}


def step_of(model: nn.Module, batch: dict[str, Tensor]) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: dict[str, Tensor] = batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def count_python_calls(step: Callable[[], object], n_before: int = 1) -> int:
    """Count calls of Python functions during one step in this thread, after `n_before` steps.

    Garbage is not collected in the meantime, since that would call finalizers.
    """
    count, collects = 0, gc.isenabled()

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    for _ in range(n_before):
        step()
    gc.disable()  # a collection would call finalizers of other objects
    sys.setprofile(count_call)
    step()
    sys.setprofile(None)
    if collects:
        gc.enable()
    return count


def models() -> None:
    """Print the costs of plans on whole models with tiny tensors."""
    print(f"{'model':10} {'plan':16} {'ms':>7} {'x':>6} {'Python calls':>13} {'x':>6}")
    for build in (resnet, gpt2):
        model, batch = build(tiny=False)
        profile = lowtide.rehearse(model.train(), step_of(model, batch), batch)
        plan = lowtide.plan(profile, int(SHARE * profile.measured_plain_peak_bytes))
        model, batch = build(tiny=True)
        step = step_of(model.train(), batch)
        bitmask.LEAST_BYTES = 0
        engines = {
            "none": None,
            "all kept": Engine(model, parse_actions({}, [])),
            f"{SHARE:.0%} of the peak": Engine(
                model, parse_actions(plan.recompute, plan.replay, plan.advance), in_place=[plan.in_place]
            ),
        }
        calls: dict[str, int] = {}
        for name, engine in engines.items():
            if engine is not None:
                engine.install()
            calls[name] = count_python_calls(step, n_before=3)  # in the first, plans learn what a step saves
            if engine is not None:
                engine.remove()
        for name, us in (times := interleaved(step, engines)).items():
            ratios = us / times["none"], calls[name] / calls["none"]
            print(f"{build.__name__:10} {name:16} {us / 1e3:7.2f} {ratios[0]:6.2f} {calls[name]:13} {ratios[1]:6.2f}")


def mlp() -> tuple[nn.Module, Callable[[], object]]:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*parts)
    optimizer, x = torch.optim.SGD(model.parameters()), torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, step


def settled(step: Callable[[], object], **settings: Any) -> lowtide.Run:
    """Return an entered block of `within` that has made its plan, or its decision to have none."""
    run = lowtide.within(progress=False, **settings).__enter__()
    with mock.patch.multiple(later_steps, MOST_TIME=inf, MOST_COUNTING=inf):  # at the same updates on any machine
        for _ in range(WARM_UP):
            step()
    return run


def demo() -> tuple[nn.Module, Callable[[], object]]:
    from lowtide.cli.demo.workloads import workload

    work = workload("gpt2")
    return work.model, lambda: work.step(work.batches[0])


def build_tiny_gpt2() -> tuple[nn.Module, Callable[[], object]]:
    model, batch = gpt2(tiny=True)
    return model, step_of(model.train(), batch)


BUILDERS: dict[str, Callable[[], tuple[nn.Module, Callable[[], object]]]] = {
    "mlp": mlp,
    "gpt2": build_tiny_gpt2,
    "demo": demo,
}
"""Builders of models and steps for `idle`, by name."""


def idle(*names: str) -> None:
    """Print the time and the Python calls that a block of `within` adds to a step that it does not change."""
    print(f"{'model':10} {'block':22} {'us a step':>11} {'more us':>9} {'more %':>7} {'more Python calls':>18}")
    for name in names or BUILDERS:
        _, step = BUILDERS[name]()
        runs = 1 if name == "demo" else RUNS // ROUNDS
        for block, settings in {
            "budget above the peak": {"budget": 10**12},
            "no plan fits": {"budget": 1, "on_infeasible": "plain"},
        }.items():
            plain_us = inside_us = float("inf")
            for _ in range(ROUNDS):
                plain_us = min(plain_us, *interleaved(step, {"": None}, runs).values())
                n_plain = count_python_calls(step)
                run = settled(step, **settings)
                n_inside = count_python_calls(step)
                inside_us = min(inside_us, *interleaved(step, {"": None}, runs).values())
                run.leave()
            more_us = inside_us - plain_us
            share = f"{more_us / plain_us:7.2%}"
            print(f"{name:10} {block:22} {inside_us:11.1f} {more_us:9.1f} {share} {n_inside - n_plain:18}", flush=True)


if __name__ == "__main__":
    tables: dict[str, Callable[..., None]] = {"slots": slots, "models": models, "within": idle}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=tables, default="slots")
    parser.add_argument("names", nargs="*", help="steps of `within`: mlp, gpt2, demo; all by default")
    arguments = parser.parse_args()
    if arguments.names and (arguments.table != "within" or not {*arguments.names} <= {*BUILDERS}):
        parser.error(f"{' '.join(arguments.names)}: only `within` takes names, of {', '.join(BUILDERS)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()
    print(f"hooks: {'Python' if saved_values.native is None else 'compiled'}")
    tables[arguments.table](*arguments.names)
