"""The whole contest for one model: every peer, and Lowtide within that peer's own peak, side by side."""

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
"""Memory that is touched before anything is timed, in plain peaks: of all steps but one only parameters are there."""
SHARES = (80, 70, 60, 50, 40, 30)
"""Budgets, percent of the plain step's peak."""
LADDER = 20
"""Budgets from the smallest to the plain peak, for the models in LADDER_OF."""
LADDER_OF = frozenset({"gpt2"})
ROUNDS = 3
"""Rounds in which every step is timed once."""
MOST_ROUNDS = 8
"""For the cells whose times are claimed."""


@dataclass(slots=True, eq=False)
class Running:
    """One model's contest under way: everything is measured, and then timed in rounds. `say` gets each line."""

    name: str
    quick: bool
    rounds: int | None
    """For the times of each cell; 0 for none, None for ROUNDS, and MOST_ROUNDS where times are claimed."""
    say: Callable[[str], None]
    plain: Steps = field(init=False)
    bits: Bits = field(init=False)
    ours: Ours = field(init=False)
    turns: AlternatingModels = field(init=False)
    _timed_as: dict[str, Hashable] = field(init=False, default_factory=dict)
    """Of cells by name, what they are entered as. Cells of the same decisions are timed once."""

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
            # Who is timed in rounds stays, and a collection of garbage, of which each measured step has several, need
            # not look at it again.
            gc.collect()
            gc.freeze()
        for asked in self._budgets(contest):
            yield self._within(asked)

    def _duel(self, way: Way) -> Iterator[Cell]:
        """The peer, and Lowtide within its peak."""
        peer = Cell(kind="peer", name=way.name)
        with functorch_config.patch(dict(way.settings)):
            try:
                made = contestant(self.name, quick=self.quick)
                theirs = Steps(made.model, made.batch, way.apply(made.model))
                if way.settings:
                    theirs.seconds()  # what compiles, compiles now
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
        """The cells again, with times."""
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
    """The processor's model name, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
