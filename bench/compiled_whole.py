"""Lowtide on models that are compiled as a whole, beside inductor's own budget and checkpointing: bytes, FLOPs, bits.

    python bench/compiled_whole.py                   # all rows that are not measured yet; writes docs/compiled_whole.md
    python bench/compiled_whole.py --models resnet   # the rows of this model alone
    python bench/compiled_whole.py --seconds 120     # begins no row later than that; the next call goes on
    python bench/compiled_whole.py --page            # only writes the page again, from docs/compiled_whole.json
    KERNELS=0 python bench/compiled_whole.py ...     # soon: leaves out inductor's kernels, and compares no bits

Each model is compiled by `torch.compile(model)` with inductor.

- *way*: Lowtide's budgets are the peaks of the other methods, and shares of the plain step's peak.
- *peak*: the highest use of the CPU allocator, parameters and gradients included.
- *MFLOP again*: matrix products, convolutions and attention that backward computes again, as torch counts FLOPs.
  Lowtide looks for little estimated time: one small convolution may be estimated to take less time than much
  arithmetic, which has no FLOPs in this count.
- *gradients*: compared bit by bit with those of the compiled step without a budget, if inductor compiled the row's
  kernels. In the other rows (*not compared*), code that writes zeros and needs the same memory takes the kernels'
  place. If backward draws other random numbers, gradients are wrong.
- last column: the predicted peak (*forecast*). Inductor *schedules* up to four plans without kernels, and their steps
  are measured. The best plan is *compiled*, and at most two more if its peak is above the budget.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from contest import by_hand, tables
from contest.models import BUILDERS, SEED, Contestant, Size
from contest.step import Bits, Steps
from contest.ways import checkpoint_every_nth_block
from torch._functorch import config as functorch_config

import lowtide
from lowtide._torch.inductor import always_partitioned, kernels_left_out, partitioning_by
from lowtide.api.compiled_fit import COMPILED_REPAIRS, SCHEDULED, find_cheapest_within
from lowtide.api.plan_attempts import plan_by_forecast
from lowtide.levers.selection import Choice
from lowtide.planner.planning import find_smallest_plan, predict_unplanned_step, recompute_products
from lowtide.planner.records import Decisions, Plan
from lowtide.runtime.compiled_plan import PlanPartitioner
from lowtide.runtime.joint_slots import JointSlots
from lowtide.runtime.static_memory import static_bytes

HAS_KERNELS = os.environ.get("KERNELS", "1") != "0"
"""False to compile no kernels: code that writes zeros allocates the same, so peaks and FLOPs are the true ones."""
OF_TOKENS = Size(layers=2, length=128, rows=8, vocabulary=1000)
BY_HAND: dict[str, Callable[[], Contestant]] = {
    "gpt2-by-hand": partial(by_hand.gpt2, 0.0),
    "gpt2-dropout-by-hand": partial(by_hand.gpt2, 0.1),
    "resnet-by-hand": by_hand.resnet,
    "staged-resnet-by-hand": by_hand.staged_resnet,
}
SIZES = {
    "gpt2": OF_TOKENS,
    "gpt2-dropout": OF_TOKENS,
    "llama": OF_TOKENS,
    "bert": OF_TOKENS,
    "vit": Size(layers=2, length=96, rows=8),
    "resnet": Size(layers=1, length=96, rows=32),
}
MODELS = (*BY_HAND, *SIZES)
SHARES = (0.8, 0.5, 0.3, 0.1, 0.0)
"""Budgets as shares of the saved bytes, as `activation_memory_budget` takes them."""
PERCENT = (80, 70, 60, 50, 40, 30)
"""Further budgets for Lowtide, in percent of the plain step's peak."""
PLAIN = "compiled as a whole"
SMALLEST = "**Lowtide**, smallest peak"
RESULTS = tables.DOCS / "compiled_whole.json"


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of a step, compared with the plain step."""

    way: str
    peak_bytes: int
    flops: int
    """FLOPs that backward computes again."""
    unequal: str
    """Description of the gradients that have other bits than the plain step's."""
    what: str = ""
    date: str = ""

    def line(self, plain_bytes: int) -> str:
        """Format this row as a line of a Markdown table."""
        peak = f"{self.peak_bytes / 2**20:.2f} MiB | {self.peak_bytes / plain_bytes:.1%}"
        flops = "" if self.what.startswith("refused") else f"{self.flops / 1e6:.0f}"
        return f"| {self.way} | {peak} | {flops} | {self.unequal} | {self.what} |"


class Measuring:
    """All rows of one model, including rows that earlier runs measured."""

    def __init__(self, name: str, until: float) -> None:
        self.name, self._until = name, until
        self._stored: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        self._bits: Bits | None = None
        self._ours: tuple[Steps, lowtide.Profile] | None = None

    @property
    def rows(self) -> list[Row]:
        """All rows measured so far."""
        return [Row(**fields) for fields in self._stored.get(self.name, {}).get("rows", [])]

    def run(self) -> None:
        """Measure the rows that are missing, until there is no time left."""
        for way, row in self._ways():
            if any(known.way == way for known in self.rows):
                continue
            if time.monotonic() > self._until:
                return
            torch._dynamo.reset()
            self._store(replace(row(way), date=datetime.date.today().isoformat()))

    def _store(self, row: Row) -> None:
        entry = self._stored.setdefault(self.name, {"rows": []})
        entry["rows"].append(asdict(row))
        entry["description"] = built(self.name).description
        RESULTS.write_text(json.dumps(self._stored, indent=1) + "\n", encoding="utf-8")
        print(row.line(self.rows[0].peak_bytes), flush=True)

    def _ways(self) -> Iterator[tuple[str, Callable[[str], Row]]]:
        """Yield every way to save memory by name, with the function that measures it.

        Peers come first, because their peaks are budgets for Lowtide.
        """
        yield PLAIN, self._measure_by_torch
        for share in SHARES:
            yield f"`activation_memory_budget` {share}", partial(self._measure_by_torch, share=share)
        yield "`torch.utils.checkpoint` around every block", partial(self._measure_by_torch, every=1)
        peers = {row.way: row for row in self.rows}
        for way, row in peers.items():
            if row.peak_bytes < peers[PLAIN].peak_bytes and not way.startswith("**"):
                yield f"**Lowtide** at {way}'s peak", partial(self._measure_by_lowtide, budget=row.peak_bytes)
        yield SMALLEST, self._measure_by_lowtide
        lowest = min((row.peak_bytes for row in self.rows if row.way == SMALLEST), default=0)
        for percent in PERCENT:
            budget = peers[PLAIN].peak_bytes * percent // 100
            if budget >= lowest:
                yield f"**Lowtide, {percent} %**", partial(self._measure_by_lowtide, budget=budget)

    def _measure_by_torch(self, way: str, share: float = 1.0, every: int = 0) -> Row:
        seen: list[JointSlots] = []
        partitioner = PlanPartitioner()
        partitioner.on_compile = seen.append
        steps = compiled(self.name, every)
        with functorch_config.patch(activation_memory_budget=share), always_partitioned(), partitioning_by(partitioner):
            peak_bytes, bits = measured(steps)
        again = [graph.joint.nodes[node] for graph in seen for node in graph.as_torch().again]
        flops = sum(node.flops for node in again)
        if way == PLAIN:
            self._bits = bits
            return Row(way, peak_bytes, flops, "")
        drawn = "backward draws other random numbers" if any(node.is_random for node in again) else ""
        return Row(way, peak_bytes, flops, ", ".join(filter(None, (self._unequal(bits), drawn))))

    def _measure_by_lowtide(self, way: str, budget: int | None = None) -> Row:
        """Measure a plan for `budget` bytes; None stands for the smallest peak."""
        if self._ours is None:
            steps = compiled(self.name)
            self._ours = steps, alone(lowtide.rehearse(steps.call, steps.step, steps.batch))
        steps, profile = self._ours
        bits: dict[Decisions, Bits] = {}

        def peak_of(plan: Plan) -> int:
            with lowtide.apply(steps.call, plan):
                peak_bytes, bits[plan.decisions] = measured(steps)
            return peak_bytes

        def scheduled(plan: Plan) -> int:
            with kernels_left_out(), always_partitioned():
                return peak_of(plan)

        choice = Choice(profile, predict_unplanned_step(profile))
        smallest = find_smallest_plan(profile)
        if budget is None:
            smallest = min(smallest, recompute_products(profile), key=scheduled)
            budget = scheduled(smallest)
        try:
            first = plan_by_forecast(profile, budget)
        except lowtide.Infeasible:
            first = replace(smallest, budget_bytes=budget)
        forecast_bytes, n_compiled = first.predicted.peak_bytes, 0
        n_scheduled, best = find_cheapest_within(choice, first, scheduled, SCHEDULED, tries_one_kind=True)
        assert best is not None
        if HAS_KERNELS and best.predicted.peak_bytes <= budget:
            n_compiled, best = find_cheapest_within(choice, best, peak_of, COMPILED_REPAIRS)
            assert best is not None
        what = f"forecast {forecast_bytes / 2**20:.2f} MiB; {n_scheduled} scheduled, {n_compiled} compiled"
        if best.predicted.peak_bytes > budget:
            return Row(way, best.predicted.peak_bytes, 0, "", f"refused: the lowest of {n_scheduled} plans scheduled")
        return Row(
            way, best.predicted.peak_bytes, best.predicted.extra_flops, self._unequal(bits[best.decisions]), what
        )

    def _unequal(self, found: Bits) -> str:
        """Describe the gradients that have other bits than the plain step's, with their largest relative difference."""
        if not HAS_KERNELS:
            return "not compared"
        if self._bits is None:
            steps = compiled(self.name)
            steps.seconds()
            self._bits = steps.bits()
        plain = self._bits.gradients
        apart = {name: float((found.gradients[name] - grad).norm() / grad.norm()) for name, grad in plain.items()}
        n = sum(not torch.equal(grad, found.gradients[name]) for name, grad in plain.items())
        return "same" if not n else f"{n} of {len(apart)} differ, by up to {max(apart.values()):.0e}"


def alone(profile: lowtide.Profile) -> lowtide.Profile:
    """Return `profile` without the memory of other tensors, such as the plain step's gradients kept by this process."""
    assert profile.measured_plain_peak_bytes is not None
    return replace(
        profile,
        static=replace(profile.static, others=0),
        measured_plain_peak_bytes=profile.measured_plain_peak_bytes - profile.static.others,
    )


def built(name: str) -> Contestant:
    """Build a model and its batch, equal in every call."""
    torch.manual_seed(SEED)
    made = BY_HAND[name]() if name in BY_HAND else BUILDERS[name][0](SIZES[name])
    made.model.train()
    return made


def compiled(name: str, every: int = 0) -> Steps:
    """Build a model that is compiled as a whole, with a checkpoint around every `every`th block."""
    made = built(name)
    if name in ("gpt2", "gpt2-dropout"):  # else the model's first forward warns, which breaks the graph
        made.model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    if every and name in BY_HAND:
        by_hand.checkpointed(made.model, every)
    elif every:
        checkpoint_every_nth_block(made.model, every)
    call: Any = torch.compile(made.model)
    return Steps(made.model, made.batch, call, has_plan=True)


def measured(steps: Steps) -> tuple[int, Bits]:
    """Measure the peak and the bits of a step that begins in the initial state."""
    steps.seconds()
    static, _ = static_bytes(steps.model, steps.batch, ())
    steps.reset()
    with lowtide.measure(steps.model) as memory:
        steps.step(steps.batch)
    return static.total + memory.peak_bytes, steps.bits()


COLUMNS = ("| way | peak | of plain | MFLOP again | gradients | |", "|---|---:|---:|---:|---|---|")


def write_page(doc: str) -> None:
    """Write the page from all stored rows; `doc` is this file's docstring."""
    stored = json.loads(RESULTS.read_text())
    days = sorted({row["date"] for entry in stored.values() for row in entry["rows"]})
    on = f"torch {torch.__version__}, Python {platform.python_version()}, one thread; measured on {' and '.join(days)}."
    about = tables.find_text_after_commands(doc)
    lines = ["# Models compiled as a whole", "", "Made by `python bench/compiled_whole.py`.", "", *about, "", on]
    for name in MODELS:
        if name in stored:
            rows = [Row(**fields) for fields in stored[name]["rows"]]
            lines += tables.rows_of(stored[name]["description"], COLUMNS, rows)
            lines += ["", *comparison(rows)]
    (tables.DOCS / "compiled_whole.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def comparison(rows: list[Row]) -> Iterator[str]:
    """Yield a line for each peer that takes fewer FLOPs than Lowtide at the peer's peak, and a line on the lowest
    peaks.
    """
    by_way = {row.way: row for row in rows}
    peers = [row for row in rows if not row.way.startswith("**") and row.way != PLAIN]
    for peer in peers:
        ours = by_way.get(f"**Lowtide** at {peer.way}'s peak")
        if ours is None:
            continue
        if ours.what.startswith("refused"):
            yield f"- {peer.way} wins: Lowtide finds no plan for {peer.peak_bytes / 2**20:.2f} MiB."
        elif ours.flops > peer.flops:
            yield f"- {peer.way} wins: {peer.flops / 1e6:.0f} MFLOP again at that peak, Lowtide {ours.flops / 1e6:.0f}."
    mine = [row.peak_bytes for row in rows if row.way.startswith("**") and not row.what.startswith("refused")]
    if peers and any(row.way.startswith("**Lowtide, ") for row in rows):
        lowest = min(peers, key=lambda row: row.peak_bytes)
        yield (
            f"- The lowest peak of the others is {lowest.peak_bytes / 2**20:.2f} MiB ({lowest.way}); of the budgets "
            f"here, Lowtide's is {min(mine) / 2**20:.2f} MiB."
        )


def main() -> None:
    """Measure the missing rows of the models that the command line names, and write the page."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the stored rows")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    torch.set_num_threads(1)
    with nullcontext() if HAS_KERNELS else kernels_left_out():
        for name in () if asked.page else asked.models:
            Measuring(name, until).run()
    write_page(__doc__)


if __name__ == "__main__":
    main()
