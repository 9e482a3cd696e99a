"""Compare Lowtide with checkpointing on models that FSDP2 shards over two processes: bytes, FLOPs, times, bits.

    python bench/sharded.py                   # some 10 minutes on two cores; writes docs/sharded.md
    python bench/sharded.py --models llama    # prints the rows of this model alone
    python bench/sharded.py --processes       # writes only the section on four processes again; two minutes
    python bench/sharded.py --published       # writes only the last two sections again; four minutes of one core

Each repeated block, and then the whole model, is sharded with `fully_shard` over two processes, which communicate by
gloo and have one core each. The plain step, in the first row, is FSDP2 alone.

- *peak*: the highest use of the CPU allocator in the first process, including its shards of parameters and of AdamW's
  state, and the batch.
- *FLOPs*: those in addition to the plain step's.
- *time*: the fastest of 5 steps, divided by the fastest of 5 plain steps just before them. It varies by up to 30 %.
- *collectives*: the number of collective operations in a step.
- *bits*: the parameters after two steps, in both processes, compared with those after two plain steps.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "processes"))

import compared
import torch
from contest import allocator, tables
from contest.flops import Flops
from contest.models import SEED, Batch, contestant
from contest.ways import blocks, checkpoint_every_nth_block
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard

import lowtide
from comparing import equal
from lowtide._torch.distributed import count_collectives
from lowtide.estimator.absent_processes import AbsentProcesses
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.allocator.simulation import simulate
from lowtide.memory.gpu_specs import parse_gpus
from lowtide.memory.nccl_memory import REPORTS
from lowtide.planner import find_smallest_peak
from lowtide.report.text_table import decisions
from lowtide.runtime.static_memory import static_bytes
from lowtide.script.estimate_steps import estimate_script
from lowtide.script.runner import Script
from lowtide.units import format_bytes
from lowtide.utils.amounts import parse_bytes

if TYPE_CHECKING:
    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate

MODELS = ("gpt2-dropout", "llama")
ROUNDS = 5
"""Number of timed steps, of which the fastest counts."""
SHARES = (70, 50)
"""Budgets in percent of the plain step's peak."""


class Sharded:
    """A model of the contest, sharded by FSDP2, and its steps."""

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
        """Return this process's part of each parameter after two steps from the initial state."""
        for _ in range(2):
            self.step(self.batch)
        return [p.to_local().detach().clone() for p in self.model.parameters()]

    def taken(self) -> tuple[int, int]:
        """Measure a step: the bytes at its peak, and the number of collective operations that it takes part in."""
        static, _ = static_bytes(self.model, self.batch, [self.optimizer])
        before = count_collectives()
        with lowtide.measure() as memory:
            self.step(self.batch)
        return static.total + memory.peak_bytes, count_collectives() - before

    def flops(self) -> int:
        with Flops() as counter:
            self.step(self.batch)
        return counter.total

    def seconds(self) -> float:
        """Return the seconds of the fastest of ROUNDS steps."""
        found = []
        for _ in range(ROUNDS):
            distributed.barrier()
            began = time.perf_counter()
            self.step(self.batch)
            found.append(time.perf_counter() - began)
        return min(found)


def section(name: str) -> Iterator[str]:
    """Yield the table of one model, line by line, as it is measured. Both processes must read it to its end."""
    yield from ("", f"## {contestant(name).description}", "")
    yield from (
        "| way | peak | of plain | FLOPs | time | collectives | bits | what was done |",
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

    line, theirs = row(
        "the same, checkpoint every block", Sharded(name, lambda model: checkpoint_every_nth_block(model, 1))
    )
    yield line
    ours = Sharded(name)
    profile = lowtide.rehearse(ours.model, ours.step, ours.batch, optimizer=ours.optimizer)
    budgets = {"at that peak": theirs, **{f"{share} %": plain_bytes * share // 100 for share in SHARES}}
    budgets["the smallest"] = find_smallest_peak(profile)[1].peak_bytes
    for budget, budget_bytes in budgets.items():
        ours = Sharded(name)
        try:
            plan = lowtide.plan(profile, budget_bytes)
        except lowtide.Infeasible:
            continue
        with lowtide.apply(ours.model, plan):
            yield row(f"**Lowtide, {budget}**", ours, decisions(plan))[0]


class Published(NamedTuple):
    """A step with its published memory: reserved and, if given, active bytes, as `torch.cuda.memory_stats` has them."""

    name: str
    device: str
    options: str
    reserved: str
    source: str
    active: str = ""
    script: str = "llama3.py"


TORCHTITAN = (
    "[torchtitan](https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/"
    "llama3_h100_202412_torchtitan.md)"
)
PER_PARAMETER = "[torchtitan #165](https://github.com/pytorch/torchtitan/pull/165)"
THUNDER = "[Thunder #940](https://github.com/Lightning-AI/lightning-thunder/pull/940)"
PUBLISHED = (
    Published("Llama 3.1 8B, 2 x 8192 tokens, selective checkpointing", "8 x h100-80", "", "82.4 GiB", TORCHTITAN),
    Published("the same", "128 x h100-80", "", "67.0 GiB", TORCHTITAN),
    Published(
        "Llama 2 7B, 8 x 2048 tokens, selective checkpointing",
        "8 x h100-80",
        "--size 7B --rows 8 --tokens 2048 --hold-logits",
        "59.41 GiB",
        PER_PARAMETER,
        active="49.54 GiB",
    ),
    Published(
        "the same, blocks checkpointed",
        "8 x h100-80",
        "--size 7B --rows 8 --tokens 2048 --checkpoint full --hold-logits",
        "31.02 GiB",
        PER_PARAMETER,
        active="22.73 GiB",
    ),
    Published(
        "LitGPT's Llama 2 7B in bfloat16, 1 x 4096 tokens, parameters stay gathered",
        "8 x h100-80",
        "--rows 1",
        "",
        THUNDER,
        active="47.45 GB",
        script="litgpt.py",
    ),
)
PROCESSES_HEADING, NCCL_HEADING = "## Estimates compared with four processes", "## Memory of NCCL"
PUBLISHED_HEADING = "## Estimates compared with published measurements"


def compare_four_processes() -> Iterator[str]:
    """Yield the section that compares estimates with small models on four processes."""
    yield from ("", PROCESSES_HEADING, "")
    yield (
        "A small model of three blocks, with AdamW, on a CPU. All bytes include the process's parameters, optimizer"
        " and batch.\n\n"
        "- *estimated*: the peak that one process estimates, without the other processes.\n"
        "- *measured*: the peak of one of four processes that communicate by gloo: the smallest of four steps, "
        "because gloo's threads free some of the sent tensors, unseen by the recorder.\n"
        "- *gloo's copies*: gloo, unlike NCCL, copies the input of a reduction or scatter, and the output of a "
        "gather. Estimates leave these copies out. For the column *measured*, parts are reduced and broadcast one "
        "by one, which needs no copies; this column shows how much the copies would add to that peak."
    )
    yield ""
    yield "| way | rank | estimated | measured | difference | gloo's copies |"
    yield "|---|---:|---:|---:|---:|---:|"
    for case, ranks in compared.compare([*compared.CASES]):
        for rank, (estimate, measured, with_copies) in ranks.items():
            cells = (case, rank, f"{estimate:,} B", f"{measured:,} B", f"{estimate / measured - 1:+.3%}")
            yield f"| {' | '.join(map(str, cells))} | {with_copies / measured - 1:+.2%} |"


def nccl() -> Iterator[str]:
    """Yield the section on reported amounts of NCCL's memory."""
    yield from ("", NCCL_HEADING, "")
    yield (
        "NCCL allocates memory on each GPU outside torch's allocator. The table lists amounts that others have "
        "reported; none was measured here. An estimate counts at least the smallest of them, and at most 1.6 GB for "
        "each process group and 6 GB in all."
    )
    yield from ("", "| setting | reported | source |", "|---|---:|---|")
    yield from (f"| {r.setting} | {r.n_bytes / 1e9:.2f} GB | https://{r.source} |" for r in REPORTS)


def published() -> Iterator[str]:
    """Yield the section that compares estimates with published measurements; it needs no GPU and no other process."""
    yield from ("", PUBLISHED_HEADING, "")
    yield (
        "Five rows are too few to validate the estimates. The estimates are those of `lowtide estimate --device ..."
        " --rank 0` for `bench/published/llama3.py` and, in the last row, `litgpt.py`. The other rows of the "
        "sources use compiled models, FSDP1, Float8, pipelines or context parallelism and are left out.\n\n"
        "- *published*: the memory that the sources report, measured on H100s with a torch of 2024. In torchtitan's"
        " rows an H100 has 95 GiB; the memory of Llama 2 is reported in percent of 95.04 GiB.\n"
        "- *active*: `active_bytes`, which are compared with the estimate's allocated bytes; in the last row "
        "`max_memory_allocated`, which is reported in units of 10^9 bytes.\n"
        "- *reserved*: published reserved bytes of Llama 2 are from 1,000 steps, estimated ones from two.\n"
        "- *expandable*: the estimated reserved bytes with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. The "
        "sources do not say which allocator setting was used, so both are shown.\n\n"
        "The estimates rest on these assumptions:\n\n"
        "- The root's parameters stay gathered between forward and backward, and attention runs the kernel that "
        "torch 2.13 selects.\n"
        "- torchtitan's pull request does not name its model. Its batch is that of torchtitan's configuration for "
        "Llama 2 7B.\n"
        "- In torchtitan's rows the float32 logits live until the next ones replace them, as in its code. This "
        "assumption was found by looking for the cause of a difference: without these 1.95 GiB, active is estimated"
        " 4.0 % and 8.7 % too low.\n"
        "- Thunder's pull request gives the command of one row of its table. The row used here is assumed to have "
        "the same options, except for the compiler."
    )
    yield ""
    yield (
        "| step | GPUs | active, published | estimated | difference | reserved, published | estimated | difference "
        "| expandable | difference | source |"
    )
    yield f"|---|---|{'---:|' * 8}---|"
    for row in PUBLISHED:
        estimate = estimated(row)
        expandable = simulate(estimate.whole, AllocatorConfig.parse("expandable_segments:True"))
        cells = [row.name, row.device, row.active, *beside(estimate.peak_allocated_bytes, row.active), row.reserved]
        for reserved_bytes in (estimate.peak_reserved_bytes, expandable.peak_reserved_bytes):
            cells += beside(reserved_bytes, row.reserved)
        yield f"| {' | '.join([*cells, row.source])} |"


def beside(n_bytes: int, published: str) -> tuple[str, str]:
    """Format an estimate, and its relative difference from the published amount, if there is one."""
    return format_bytes(n_bytes), f"{n_bytes / parse_bytes(published) - 1:+.1%}" if published else ""


def estimated(row: Published) -> GpuMemoryEstimate:
    """Estimate a published step, as rank 0."""
    script = Script(target=str(Path(__file__).parent / "published" / row.script), args=tuple(row.options.split()))
    gpu, n = parse_gpus(row.device)
    with contextlib.redirect_stdout(sys.stderr):
        code, estimate = estimate_script(script, gpu, processes=AbsentProcesses(size=n or 1))
    assert estimate is not None, code
    return estimate


def renew(heading: str, sections: Iterable[Iterable[str]], until: str | None = None) -> None:
    """Replace the sections of the page docs/sharded.md from `heading` on, up to the heading `until`."""
    page = (tables.DOCS / "sharded.md").read_text(encoding="utf-8")
    before, _, after = page.partition(heading)
    rest = [] if until is None else ["", *(until + after.partition(until)[2]).rstrip().splitlines()]
    tables.write("sharded", before.rstrip().splitlines(), [*sections, rest])


def work(rank: int, meeting: str, models: list[str] | None) -> None:
    """Run in each process: measure the models' tables; the first process prints and writes them."""
    assert __doc__ is not None
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found: Iterable[Iterable[str]] = map(section, models or MODELS)
    if rank == 0:
        head = tables.head("sharded", "Sharded models", __doc__, "two processes of one thread each")
        tables.write(None if models else "sharded", head, found)
    else:
        for lines in found:
            list(lines)
    distributed.destroy_process_group()


def main() -> None:
    assert __doc__ is not None
    if sys.argv[1:] == ["--processes"]:
        renew(PROCESSES_HEADING, [compare_four_processes()], until=NCCL_HEADING)
        return
    if sys.argv[1:] == ["--published"]:
        renew(NCCL_HEADING, [nccl(), published()])
        return
    models = tables.parse_models(__doc__, MODELS)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(f"{folder}/meeting", models), nprocs=2)  # type: ignore[no-untyped-call]
    if models is None:
        renew(PROCESSES_HEADING, [compare_four_processes(), nccl(), published()])


if __name__ == "__main__":
    main()
