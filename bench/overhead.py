"""What the hooks cost in Python: microseconds a saved tensor, a module call and a replay, on tensors of four numbers.

    python bench/overhead.py

Each row is the time of a whole step with the plan less that without, over the number of tensors or calls; the op that a
recompute redoes is part of it. Best of many runs on one thread, so that a busy machine changes little.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.planner.address_nodes import NOTED
from lowtide.runtime.engine import Engine, actions_for

COUNT = 200
"""Tensors or calls in one step."""

FOUR = torch.full((4,), 0.5, requires_grad=True)


class Chain(nn.Module):
    """A chain of one op, each of which saves one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(COUNT):
            x = x.tanh()
        return x


class Numbers(nn.Module):
    """A chain of sums with a number, each of which is saved."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(COUNT):
            x = (x + 0.5).sin()
        return x


class Calls(nn.Module):
    """A chain of parts that are modules."""

    def __init__(self, part: Callable[[], nn.Module], count: int = COUNT) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Block(nn.Sequential):
    """Something of an ordinary size."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU())


class Short(nn.Module):
    """Something to replay: two ops that save three tensors, one of which is the argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * x.tanh()


@contextmanager
def planned(model: nn.Module, recompute: dict[str, str] | None = None, replay: list[str] | None = None) -> Any:
    engine = Engine(model, actions_for(recompute or {}, replay or []))
    engine.install()
    try:
        yield
    finally:
        engine.remove()


def best(
    model: nn.Module,
    around: AbstractContextManager[Any],
    *,
    backward: bool = True,
    runs: int = 60,
    x: Tensor = FOUR,
) -> float:
    """Microseconds of the fastest step."""
    fastest = float("inf")
    with around:
        for _ in range(runs):
            began = time.perf_counter()
            loss = model(x).sum()
            if backward:
                loss.backward()
            fastest = min(fastest, time.perf_counter() - began)
            del loss
    return fastest * 1e6


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chain, numbers, identities, shorts = (
        model.train() for model in (Chain(), Numbers(), Calls(nn.Identity), Calls(Short))
    )
    all_recomputed = {f"#0:{n}": "TanhBackward0" for n in range(1, COUNT)}
    all_noted = {f"#0:{n}": f"AddBackward0{NOTED}" for n in range(1, COUNT)}
    all_replayed = [f"parts.{n}#0" for n in range(COUNT)]
    identity_hooks = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    plain, sums, calls, short = (best(model, nullcontext()) for model in (chain, numbers, identities, shorts))
    seams = best(shorts, planned(shorts))
    rows = [
        ("hooks that do nothing, a tensor", best(chain, identity_hooks) - plain, None),
        ("kept, a tensor", best(chain, planned(chain)) - plain, 5),
        ("recomputed, a tensor (its op included)", best(chain, planned(chain, all_recomputed)) - plain, 15),
        ("recomputed with a number, a tensor (two ops)", best(numbers, planned(numbers, all_noted)) - sums, None),
        ("seam, a module call", best(identities, planned(identities)) - calls, None),
        ("seam without gradients, a module call", best_without_gradients(identities), None),
        ("replayed, a call (its three ops included)", best(shorts, planned(shorts, None, all_replayed)) - seams, None),
    ]
    blocks, x = Calls(Block, 12).train(), torch.randn(256, 512)
    pairs = [(best(blocks, nullcontext(), x=x, runs=1), best(blocks, planned(blocks), x=x, runs=1)) for _ in range(40)]
    without, kept = map(min, zip(*pairs, strict=True))
    print(f"12 blocks of width 512, all kept: {kept / without - 1:+.2%}; with a plan that changes nothing: no hooks\n")
    print(f"a plain step takes {plain / COUNT:.1f} us an op, and {short / COUNT:.1f} us a call of three ops\n")
    print(f"{'what':44} {'us':>7} {'at most':>8}")
    for what, total, limit in rows:
        print(f"{what:44} {total / COUNT:7.2f} {limit if limit is not None else '':>8}")


def best_without_gradients(model: nn.Module) -> float:
    with torch.no_grad():
        plain = best(model, nullcontext(), backward=False)
        return best(model, planned(model), backward=False) - plain


if __name__ == "__main__":
    main()
