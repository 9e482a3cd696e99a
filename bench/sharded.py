"""Lowtide on models that FSDP2 has sharded over two processes, beside checkpointing: exact bytes, FLOPs, times, bits.

    python bench/sharded.py                   # some 10 minutes on two cores; writes docs/sharded.md
    python bench/sharded.py --models llama    # prints the rows of this model alone

Each repeated block and the whole are sharded with `fully_shard`; gloo connects the processes, which have a core each.
Peaks are the CPU allocator's in the first process, with AdamW's state, its parameters' parts and the batch. FLOPs are
beyond the plain step's. Times are the fastest of 5 steps over the fastest of 5 plain ones before; they scatter by up to
30 %. Sent is how many collective operations a step takes. Bits are those of the parameters after two steps, in both
processes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from contest import allocator, tables
from contest.flops import Flops
from contest.models import SEED, Batch, contestant
from contest.ways import blocks, every_nth_block
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard

import lowtide
from comparing import equal
from lowtide._torch.distributed import n_collectives
from lowtide.planner import smallest_peak
from lowtide.report.text_table import decisions
from lowtide.runtime.fingerprint import static_bytes

MODELS = ("gpt2-dropout", "llama")
ROUNDS = 5
"""The fastest step of so many counts."""
SHARES = (70, 50)
"""Budgets, percent of the plain step's peak."""


class Sharded:
    """A model of the contest, sharded, and its steps."""

    def __init__(self, name: str, change: Callable[[Any], Any] = lambda model: model) -> None:
        made = contestant(name)
        self.model: Any = made.model
        self.batch = made.batch
        change(self.model)
        mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in (*blocks(self.model), self.model):
            fully_shard(block, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(SEED + 1)

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def parts(self) -> list[Tensor]:
        """This process's part of each parameter after two steps from the first state."""
        for _ in range(2):
            self.step(self.batch)
        return [p.to_local().detach().clone() for p in self.model.parameters()]

    def taken(self) -> tuple[int, int]:
        """Bytes at the peak of a step, and how many collective operations it takes part in."""
        static, _ = static_bytes(self.model, self.batch, [self.optimizer])
        before = n_collectives()
        with lowtide.measure() as memory:
            self.step(self.batch)
        return static.total + memory.peak_bytes, n_collectives() - before

    def flops(self) -> int:
        with Flops() as counter:
            self.step(self.batch)
        return counter.total

    def seconds(self) -> float:
        """Of the fastest step."""
        found = []
        for _ in range(ROUNDS):
            distributed.barrier()
            began = time.perf_counter()
            self.step(self.batch)
            found.append(time.perf_counter() - began)
        return min(found)


def section(name: str) -> Iterator[str]:
    """The table of one model, line by line, as it is measured. Both processes have to come to the end of it."""
    yield from ("", f"## {contestant(name).description}", "")
    yield from (
        "| way | peak | of plain | FLOPs | time | sent | bits | what was done |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    )
    plain = Sharded(name)
    parts, (plain_bytes, sent), plain_flops = plain.parts(), plain.taken(), plain.flops()
    allocator.warm_up(3 * plain_bytes)
    plain_seconds = plain.seconds()
    yield f"| FSDP2 | {plain_bytes / 2**20:.1f} MiB | 100.0% | | | {sent} | | |"

    def row(way: str, steps: Sharded, what: str = "") -> tuple[str, int]:
        same = torch.tensor(equal(parts, steps.parts()))
        distributed.all_reduce(same, distributed.ReduceOp.MIN)
        (peak_bytes, sent), flops, seconds = steps.taken(), steps.flops() / plain_flops - 1, steps.seconds()
        cells = (
            way,
            f"{peak_bytes / 2**20:.1f} MiB",
            f"{peak_bytes / plain_bytes:.1%}",
            f"{flops:+.1%}",
            f"{seconds / plain_seconds:.2f} x",
            str(sent),
            "same" if same else "other",
            what,
        )
        return f"| {' | '.join(cells)} |", peak_bytes

    line, theirs = row("the same, checkpoint every block", Sharded(name, lambda model: every_nth_block(model, 1)))
    yield line
    ours = Sharded(name)
    profile = lowtide.rehearse(ours.model, ours.step, ours.batch, optimizer=ours.optimizer)
    budgets = {"at that peak": theirs, **{f"{share} %": plain_bytes * share // 100 for share in SHARES}}
    budgets["the smallest"] = smallest_peak(profile)[1].peak_bytes
    for budget, budget_bytes in budgets.items():
        ours = Sharded(name)
        try:
            plan = lowtide.plan(profile, budget_bytes)
        except lowtide.Infeasible:
            continue
        with lowtide.apply(ours.model, plan):
            yield row(f"**Lowtide, {budget}**", ours, decisions(plan))[0]


def work(rank: int, meeting: str, models: list[str] | None) -> None:
    """In each process; the first one tells."""
    assert __doc__ is not None
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found = map(section, models or MODELS)
    if rank == 0:
        head = tables.head("sharded", "Sharded models", __doc__, "two processes of one thread each")
        tables.write(None if models else "sharded", head, found)
    else:
        for lines in found:
            list(lines)
    distributed.destroy_process_group()


def main() -> None:
    assert __doc__ is not None
    models = tables.models_asked(__doc__, MODELS)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"{folder}/meeting", models), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
