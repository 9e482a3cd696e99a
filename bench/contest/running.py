"""The whole contest for one model: every peer, and Lowtide within that peer's own peak, side by side."""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch._functorch import config as functorch_config

from contest import allocator
from contest.claims import EVERY_BLOCK
from contest.models import contestant
from contest.ours import Ours
from contest.records import Cell, Contest
from contest.step import Bits, Steps
from contest.turns import Timed, take_turns
from contest.ways import Way, ways
from lowtide.identity import static_bytes
from lowtide.planner import predict
from lowtide.planner.records import Decisions

ROOM = 4
"""Memory that is touched before anything is timed, in plain peaks: three models at a time, and gaps between blocks."""
SHARES = (80, 70, 60, 50, 40, 30)
"""Budgets, percent of the plain step's peak."""
LADDER = 20
"""Budgets from the smallest to the plain peak, for the models in LADDER_OF."""
LADDER_OF = frozenset({"gpt2"})
ROUNDS = 2, 2
"""Turns for the times of each cell, at least and at most: so few that the whole takes some 25 minutes on two cores."""
CLAIMED_ROUNDS = 4, 8
"""For the cells whose times are claimed."""


@dataclass(slots=True, eq=False)
class Running:
    """One model's contest under way. `watch` is told each cell as it is done."""

    name: str
    quick: bool
    rounds: int | None
    """Turns for the times of each cell; 0 for none, None for ROUNDS and CLAIMED_ROUNDS."""
    watch: Callable[[Contest | None, Cell], None]
    plain: Steps = field(init=False)
    bits: Bits = field(init=False)
    ours: Ours = field(init=False)

    def run(self) -> Contest:
        began = time.perf_counter()
        made = contestant(self.name, quick=self.quick)
        self.plain = Steps.of(made)
        self.bits = self.plain.bits()
        plain_cell = Cell(kind="plain", name="plain", **self.plain.measure(self.bits).as_fields())
        self.watch(None, plain_cell)
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
            contest = replace(contest, cells=(*contest.cells, cell), wall_seconds=time.perf_counter() - began)
            self.watch(contest, cell)
        return contest

    def _cells(self, contest: Contest) -> Iterator[Cell]:
        for way in ways():
            yield from self._duel(way)
            gc.collect()
        for asked in self._budgets(contest):
            yield self._alone(asked)

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

    def _duel(self, way: Way) -> Iterator[Cell]:
        """The peer, and Lowtide within its peak. Plain, peer and Lowtide take turns for the times."""
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
            asked = Cell(
                kind="peer's peak", name=f"at the peak of: {way.name}", rival=way.name, budget_bytes=peer.peak_bytes
            )
            with self.ours.within(asked) as cell:
                entrants = [self.plain, theirs, *([] if cell.refusal else [self.ours.steps])]
                plain, *others = self._times(entrants, claimed=way.name == EVERY_BLOCK)
        peer, cell = (_timed(c, t, plain) for c, t in zip((peer, cell), [*others, None][:2], strict=True))
        yield from (peer, cell)

    def _times(self, entrants: Sequence[Steps], *, claimed: bool) -> list[Timed | None]:
        """In turns, the plain step first."""
        usual = CLAIMED_ROUNDS if claimed else ROUNDS
        least, most = usual if self.rounds is None else (self.rounds, self.rounds)
        return take_turns(entrants, least, most)

    def _alone(self, asked: Cell) -> Cell:
        with self.ours.within(asked) as cell:
            if cell.refusal or asked.kind == "ladder":
                return cell
            plain, mine = self._times([self.plain, self.ours.steps], claimed=asked.kind == "half")
        return _timed(cell, mine, plain)


def _timed(cell: Cell, mine: Timed | None, plain: Timed | None) -> Cell:
    if mine is None or plain is None:
        return cell
    return replace(cell, seconds=mine.seconds, plain_seconds=plain.seconds, turns=mine.turns, faults=mine.faults)


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
