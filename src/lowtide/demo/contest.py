"""`compare(work, ["70%"])`: the plain loop, the same loop within each budget, and checkpointing every block.

Each run trains from the same first bit for the same number of steps, and all that it leaves behind is compared with
what the plain loop left. Its peak is then recorded over one more step. Times are taken without a recorder, and side by
side: the speed of a machine drifts, so plain steps are run between the runs, and each run is held against those before
and after it.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from lowtide import __version__
from lowtide.demo.comparison import Comparison, Run, Same
from lowtide.demo.training import Training, train
from lowtide.demo.workloads import Workload
from lowtide.errors import Infeasible, OverBudget
from lowtide.fitting import fit
from lowtide.identity import device_of, static_bytes
from lowtide.memory.events import Timeline
from lowtide.memory.measuring import recorder_for
from lowtide.planner import plain_peak
from lowtide.planner.records import Profile
from lowtide.rehearsal import rehearse
from lowtide.units import format_bytes, format_time, parse_budget

STEPS = 5
"""Steps of a run. They keep the demo below three minutes on two cores."""
FEW_STEPS = 3
"""Steps of a run where a plain step takes more than SLOW_MS."""
SLOW_MS = 3000.0

_BETWEEN = 3  # plain steps between two runs
_REHEARSING, _FITTING = 5, 5  # how many plain steps they take, about

Watch = Callable[[str, int, int], None]
"""Told what is being done now, how many steps are through, and about how many there will be."""


def compare(
    work: Workload,
    budgets: Sequence[str],
    *,
    steps: int | None = None,
    watch: Watch = lambda doing, done, total: None,
) -> Comparison:
    """Train `work` plainly, within each of `budgets` (as `fit` takes them), and with every block checkpointed.

    One rehearsal serves all budgets. `steps` are those of each run: by default STEPS, or FEW_STEPS on a slow machine. A
    budget that is not reached becomes a run with a `refusal`. Raises BudgetError for one that is not an amount of
    memory, and RehearsalError if the step can't be rehearsed or is not the same twice.
    """
    pace = _Pace(work, watch, runs=len(budgets) + 1, steps=STEPS if steps is None else steps)
    with pace.stage("rehearsing", _REHEARSING):
        profile = rehearse(work.model, pace.step, work.batches[0])
    notes = list(profile.notes)
    if steps is None and profile.step_ms > SLOW_MS:
        pace.steps = FEW_STEPS
        notes.append(f"{FEW_STEPS} steps a run, not {STEPS}: a plain step takes {format_time(profile.step_ms)} here")

    duel = _Duel(work, pace)
    plain = duel.plain()
    within = [_within(budget, duel, profile) for budget in budgets]
    return Comparison(
        versions={
            "lowtide": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        model=work.name,
        description=work.description,
        batch=profile.fingerprint.batch,
        device=device_of(work.model),
        threads=torch.get_num_threads(),
        steps=pace.steps,
        items=work.items,
        items_per_step=work.items_per_step,
        losses=duel.reference.losses,
        static=profile.static,
        plain_peak_bytes=plain_peak(profile),
        runs=(plain, *within, _checkpointed(duel)),
        notes=tuple(notes),
    )


def _within(budget: str, duel: "_Duel", profile: Profile) -> Run:
    budget_bytes = parse_budget(budget, plain_peak(profile))
    name = budget.strip()
    run = Run(kind="budget", name=name, budget_bytes=budget_bytes)
    try:
        with duel.pace.stage(f"planning and verifying {name}", _FITTING):
            fitted = fit(duel.work.model, duel.pace.step, duel.work.batches[0], budget=budget_bytes, profile=profile)
    except Infeasible as error:
        duel.skip()
        smallest = error.smallest_peak_bytes
        refusal = f"no plan fits; the smallest peak of any is {format_bytes(smallest, round_up=True)}"
        return replace(run, refusal=refusal, smallest_peak_bytes=smallest)
    except OverBudget as error:
        duel.skip()
        measured = format_bytes(error.measured_peak_bytes, round_up=True)
        return replace(run, refusal=f"no plan kept to it; the best was measured at {measured}")
    with fitted:
        trained, measured_peak_bytes = duel.train(f"training within {name}")
    return duel.judge(
        replace(
            run,
            predicted_peak_bytes=fitted.plan.predicted.peak_bytes,
            measured_peak_bytes=measured_peak_bytes,
            drifted=tuple(sorted(fitted.applied.drifted)),
            plan=fitted.plan,
        ),
        trained,
    )


def _checkpointed(duel: "_Duel") -> Run:
    run = Run(kind="checkpoint", name="checkpointing")
    if duel.work.checkpoint_refused is not None:
        duel.skip()
        return replace(run, refusal=duel.work.checkpoint_refused)
    with duel.work.checkpoint_every_block():
        trained, measured_peak_bytes = duel.train("training with every block checkpointed")
    return duel.judge(replace(run, measured_peak_bytes=measured_peak_bytes), trained)


class _Duel:
    """Trains, and holds each run against the plain one and against plain steps next to it in time."""

    reference: Training
    """The plain run."""

    def __init__(self, work: Workload, pace: "_Pace") -> None:
        self.work, self.pace = work, pace
        self._plain_ms = 0.0  # the fastest of the plain steps last run

    def train(self, doing: str) -> tuple[Training, int]:
        """The loop under whatever is in force on the model, and the peak of one more step, bytes."""
        work, pace = self.work, self.pace
        with pace.stage(doing, pace.steps + 1):
            trained = train(work, pace.steps, on_step=pace.through)
            batch = work.batches[pace.steps % len(work.batches)]
            static, _ = static_bytes(work.model, batch, (work.optimizer,))
            with recorder_for(device_of(work.model)) as recorder:
                work.step(batch)
        return trained, static.total + Timeline(recorder.stream).peak_bytes

    def plain(self) -> Run:
        self.reference, measured_peak_bytes = self.train("training plainly")
        self._plain_ms = self.reference.fastest_ms
        return Run(
            kind="plain",
            name="plain",
            measured_peak_bytes=measured_peak_bytes,
            step_ms=self.reference.step_ms,
            plain_ms=self._plain_ms,
            time_ratio=1.0,
            same=Same(losses=True, gradients=True, state=True),
        )

    def judge(self, run: Run, trained: Training) -> Run:
        """`run`, with its times and its bits beside the plain ones. The plain steps after it are run here."""
        before_ms = self._plain_ms
        with self.pace.stage("plain steps again, for their time", _BETWEEN):
            self._plain_ms = train(self.work, _BETWEEN, on_step=self.pace.through).fastest_ms
        plain_ms = (before_ms + self._plain_ms) / 2
        plain = self.reference
        return replace(
            run,
            step_ms=trained.step_ms,
            plain_ms=plain_ms,
            time_ratio=trained.fastest_ms / plain_ms,
            same=Same(
                losses=[loss.hex() for loss in trained.losses] == [loss.hex() for loss in plain.losses],
                gradients=trained.gradients == plain.gradients,
                state=trained.state == plain.state,
            ),
            differences=trained.differences(plain),
        )

    def skip(self) -> None:
        """This run's steps will not be made."""
        self.pace.skip(self.pace.steps + 1 + _BETWEEN)


class _Pace:
    """Counts steps, and tells how far it all is."""

    def __init__(self, work: Workload, watch: Watch, *, runs: int, steps: int) -> None:
        self.work, self.watch = work, watch
        self.steps = steps
        """Of each run."""
        self._runs = runs
        self._skipped = 0
        self._doing = ""
        self._done, self._stop = 0, 0

    def step(self, batch: Any) -> Tensor:
        """A step of the workload that counts."""
        loss = self.work.step(batch)
        self.through()
        return loss

    def through(self, *_: object) -> None:
        """A step is through. Never more than the stage was to take, so that the whole stays true."""
        self._done = min(self._done + 1, self._stop)
        self._tell()

    def skip(self, steps: int) -> None:
        self._skipped += steps
        self._tell()

    @contextmanager
    def stage(self, doing: str, steps: int) -> Iterator[None]:
        """What happens inside takes about `steps` steps."""
        self._doing, self._stop = doing, self._done + steps
        self._tell()
        yield
        self._done = self._stop
        self._tell()

    def _tell(self) -> None:
        each = self.steps + 1 + _BETWEEN
        total = _REHEARSING + self.steps + 1 + self._runs * each + (self._runs - 1) * _FITTING - self._skipped
        self.watch(self._doing, self._done, total)
