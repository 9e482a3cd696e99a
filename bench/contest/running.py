"""The whole contest for one model: every peer, and Lowtide within the peer's peak, measured and then timed in turns."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch._functorch import config as functorch_config

from contest import allocator
from contest.claims import EVERY_BLOCK
from contest.models import contestant
from contest.ours import Ours, Planned
from contest.page import line
from contest.records import Cell, Contest
from contest.step import Bits, Steps
from contest.turns import AlternatingModels, Entrant
from contest.ways import Way, ways
from lowtide.planner import predict
from lowtide.planner.records import Decisions
from lowtide.runtime.static_memory import static_bytes

ROOM = 4
"""Memory that is touched before anything is timed, in plain peaks: only one step runs at a time, the rest hold
parameters.
"""
SHARES = (80, 70, 60, 50, 40, 30)
"""Budgets in percent of the plain step's peak."""
LADDER = 20
"""Number of budgets from the smallest to the plain peak, for the models in LADDER_OF."""
LADDER_OF = frozenset({"gpt2"})
ROUNDS = 3
"""Number of rounds; in each, every step is timed once."""
MOST_ROUNDS = 8
"""Largest number of rounds for cells about whose times claims are made."""


@dataclass(slots=True, eq=False)
class Running:
    """The contest of one model in progress: every way is measured, and then timed in rounds. `say` gets each result's
    line.
    """

    name: str
    quick: bool
    rounds: int | None
    """Number of timing rounds; 0 for no times, None for ROUNDS, and up to MOST_ROUNDS for cells with claimed times."""
    say: Callable[[str], None]
    plain: Steps = field(init=False)
    bits: Bits = field(init=False)
    ours: Ours = field(init=False)
    turns: AlternatingModels = field(init=False)
    _timed_as: dict[str, Hashable] = field(init=False, default_factory=dict)
    """Names under which cells are timed, by cell. Cells with the same decisions share a name, and are timed once."""

    def run(self) -> Contest:
        began = time.perf_counter()
        made = contestant(self.name, quick=self.quick)
        self.plain = Steps.of(made)
        self.turns = AlternatingModels(self.plain)
        self.bits = self.plain.bits()
        plain_cell = Cell(kind="plain", name="plain", **self.plain.measure(self.bits).as_fields())
        self.say(line(None, plain_cell))
        if not self.quick:
            assert plain_cell.peak_bytes is not None
            allocator.warm_up(ROOM * plain_cell.peak_bytes)
        self.ours = Ours(Steps.of(contestant(self.name, quick=self.quick), has_plan=True), self.bits)
        static, _ = static_bytes(self.plain.model, self.plain.batch, ())
        contest = Contest(
            model=self.name,
            description=made.description,
            batch=self.ours.profile.fingerprint.batch,
            versions=_versions(),
            processor=_processor(),
            threads=torch.get_num_threads(),
            quick=self.quick,
            static_bytes=static.total,
            gradient_bytes=sum(p.numel() * p.element_size() for p in self.plain.model.parameters()),
            gradients_at_peak_bytes=predict(self.ours.profile, Decisions()).parts.get("gradients", 0),
            rehearsal_seconds=self.ours.rehearsal_seconds,
            wall_seconds=0.0,
            cells=(plain_cell,),
        )
        for cell in self._cells(contest):
            contest = replace(contest, cells=(*contest.cells, cell))
            self.say(line(contest, cell))
        cells = tuple(self._timed(contest))
        return replace(contest, cells=cells, wall_seconds=time.perf_counter() - began)

    # --- what is measured -------------------------------------------------------------------------------------------

    def _cells(self, contest: Contest) -> Iterator[Cell]:
        torch._dynamo.reset()
        for way in ways():
            yield from self._duel(way)
            # Models stay alive until they are timed. Frozen, they cost no time in the garbage collections of each
            # measured step.
            gc.collect()
            gc.freeze()
        for asked in self._budgets(contest):
            yield self._within(asked)

    def _duel(self, way: Way) -> Iterator[Cell]:
        """Measure a peer, then Lowtide within the peer's peak; yield both cells."""
        peer = Cell(kind="peer", name=way.name)
        with functorch_config.patch(dict(way.settings)):
            try:
                made = contestant(self.name, quick=self.quick)
                theirs = Steps(made.model, made.batch, way.apply(made.model))
                if way.settings:
                    theirs.seconds()  # a step to compile the model
                peer = replace(peer, **theirs.measure(self.bits).as_fields())
            except Exception as error:
                yield replace(peer, refusal=_said(error))
                return
        self._enter(peer, way.name, theirs)
        yield peer
        yield self._within(
            Cell(kind="peer's peak", name=f"at the peak of: {way.name}", rival=way.name, budget_bytes=peer.peak_bytes)
        )

    def _budgets(self, contest: Contest) -> Iterator[Cell]:
        peak_bytes = contest.plain.peak_bytes
        assert peak_bytes is not None
        smallest = self.ours.smallest_peak_bytes()
        for share in SHARES:
            yield Cell(kind="share", name=f"{share} % of plain", budget_bytes=peak_bytes * share // 100)
        half, strictly = (n // 2 for n in (contest.activation_bytes, contest.beyond_static_bytes))
        yield Cell(kind="half", name="half the activations", budget_bytes=peak_bytes - half)
        yield Cell(kind="share", name="the same, gradients counted at the peak", budget_bytes=peak_bytes - strictly)
        yield Cell(kind="smallest", name="the smallest", budget_bytes=smallest)
        if self.name in LADDER_OF:
            for rung in range(LADDER):
                budget_bytes = smallest + (peak_bytes - smallest) * rung // (LADDER - 1)
                yield Cell(kind="ladder", name=f"rung {rung + 1} of {LADDER}", budget_bytes=budget_bytes)

    def _within(self, asked: Cell) -> Cell:
        cell, plan = self.ours.within(asked)
        if plan is not None and asked.kind != "ladder":
            self._enter(cell, plan.decisions, Planned(self.ours.steps, plan))
        return cell

    # --- and timed --------------------------------------------------------------------------------------------------

    def _enter(self, cell: Cell, name: Hashable, entrant: Entrant) -> None:
        self.turns.enter(name, entrant)
        self._timed_as[cell.name] = name

    def _timed(self, contest: Contest) -> Iterator[Cell]:
        """Time the steps of all cells in rounds; yield the cells with their times."""
        self.turns.take(ROUNDS if self.rounds is None else self.rounds)
        if self.rounds is None:
            claimed = [self._timed_as[c.name] for c in contest.cells if c.name in self._timed_as and _is_claimed(c)]
            self.turns.take_until_settled(claimed, MOST_ROUNDS)
        for cell in contest.cells:
            name = self._timed_as.get(cell.name)
            if name is not None and (timed := self.turns.timed(name)) is not None:
                cell = replace(cell, **asdict(timed))
                self.say(line(contest, cell))
            yield cell


def _is_claimed(cell: Cell) -> bool:
    return cell.kind == "half" or EVERY_BLOCK in (cell.name, cell.rival)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "libc": " ".join(platform.libc_ver())}
    for package in ("torch", "transformers", "torch-remat", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    """Return the processor's model name as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
