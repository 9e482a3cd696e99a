"""`compare(work, plain, ["70%"])`: the plain loop, the same loop within each budget, and with every block checkpointed.

Each run trains from the same initial bits for the same number of steps, and all its results are compared with those of
the plain loop. A run and the plain loop take turns, step by step, on two copies of the model, so that drifts of the
machine's speed affect both equally. Times are taken without a recorder; a peak is recorded over one more step.
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
from lowtide.api.fit import fit
from lowtide.cli.demo.results import Comparison, Run, Same
from lowtide.cli.demo.training import Loop
from lowtide.cli.demo.workloads import Workload
from lowtide.errors import Infeasible, OverBudget
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner.records import Profile
from lowtide.profiler import rehearse
from lowtide.profiler.other_memory import with_others
from lowtide.runtime.fingerprint import device_of, find_device
from lowtide.runtime.static_memory import static_bytes
from lowtide.units import format_bytes

STEPS = 2
"""Default number of steps of a run: few, so that the demo takes about two minutes on two cores."""

_REHEARSING, _FITTING = 5, 5  # approximate numbers of plain steps

Watch = Callable[[str, int, int], None]
"""Function called with the current activity, the number of finished steps, and an estimate of all steps."""


def compare(
    work: Workload,
    plain: Workload,
    budgets: Sequence[str],
    *,
    steps: int = STEPS,
    watch: Watch = lambda doing, done, total: None,
) -> Comparison:
    """Train `work` within each of `budgets` (as `fit` takes them) and with every block checkpointed, in turns with
    `plain`.

    `work` and `plain` are the same workload, built twice. One rehearsal serves all budgets. Each run has `steps` steps.
    A budget that is not reached becomes a run with a `refusal`, and then the smallest reachable budget is run, too.
    Raises BudgetError for a budget that is not an amount of memory, and RehearsalError if the step can't be rehearsed
    or differs between two runs.
    """
    work.exclude_from_entry()  # leave each copy out of the other's recordings
    plain.exclude_from_entry()
    pace = _Pace(work, watch, runs=len(budgets) + 1, steps=steps)
    with pace.stage("rehearsing", _REHEARSING):
        profile = rehearse(work.model, pace.step, work.batches[0])

    duel = _Duel(work, plain, pace)
    runs = [duel.plain(), *(_within(budget, budget.strip(), duel, profile) for budget in budgets)]
    smallest = min((run.smallest_peak_bytes for run in runs if run.smallest_peak_bytes is not None), default=None)
    if smallest is not None:
        pace.runs += 1
        runs.append(_within(format_bytes(smallest, round_up=True), "smallest", duel, profile))
    runs.append(_checkpointed(duel))
    return Comparison(
        versions={
            "lowtide": __version__,
            "torch": str(torch.__version__),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        model=work.name,
        description=work.description,
        optimizer=type(work.optimizer).__name__,
        batch=profile.fingerprint.batch,
        device=device_of(work.model),
        threads=torch.get_num_threads(),
        steps=steps,
        items=work.items,
        items_per_step=work.items_per_step,
        static=profile.static,
        runs=tuple(runs),
        notes=profile.notes,
        profile=profile,
    )


def _within(budget: str, name: str, duel: "_Duel", profile: Profile) -> Run:
    pace, batch = duel.pace, duel.work.batches[0]
    duel.exclude_from_entry()
    try:
        with pace.stage(f"planning and verifying {name}", _FITTING):
            fitted = fit(duel.work.model, pace.step, batch, budget=budget, profile=profile)
    except (Infeasible, OverBudget) as error:
        duel.skip()
        return _refused(name, error)
    with fitted:
        run = Run(
            kind="budget",
            name=name,
            budget_bytes=fitted.plan.budget_bytes,
            predicted_peak_bytes=fitted.plan.predicted.peak_bytes,
            plan=fitted.plan,
        )
        run = duel.run(run, f"training within {name}")
        return replace(run, drifted=tuple(sorted(fitted.applied.drifted)))


def _refused(name: str, error: Infeasible | OverBudget) -> Run:
    if isinstance(error, OverBudget):
        measured = format_bytes(error.measured_peak_bytes, round_up=True)
        why, smallest = f"no plan stayed within it; the smallest measured peak was {measured}", None
    else:
        smallest = error.smallest_peak_bytes
        why = f"no plan fits; the smallest peak of any is {format_bytes(smallest, round_up=True)}"
    return Run(kind="budget", name=name, budget_bytes=error.budget_bytes, smallest_peak_bytes=smallest, refusal=why)


def _checkpointed(duel: "_Duel") -> Run:
    run = Run(kind="checkpoint", name="checkpointing")
    if duel.work.checkpoint_refused is not None:
        duel.skip()
        return replace(run, refusal=duel.work.checkpoint_refused)
    with duel.work.checkpoint_every_block():
        return duel.run(run, "training with every block checkpointed")


class _Duel:
    """Two copies of a workload that train in turns: one plainly, the other with a plan or with checkpointing."""

    def __init__(self, work: Workload, plain: Workload, pace: "_Pace") -> None:
        self.work, self.pace = work, pace
        self._plain = plain

    def plain(self) -> Run:
        loop = Loop(self._plain)
        with self.pace.stage("training plainly", self.pace.steps + 1):
            for _ in range(self.pace.steps):
                loop.step()
                self.pace.through()
            trained = loop.result()
            self.exclude_from_entry()
            peak_bytes = _measure_next_peak(loop)
        return Run(
            kind="plain",
            name="plain",
            measured_peak_bytes=peak_bytes,
            losses=trained.losses,
            step_ms=trained.step_ms,
        )

    def run(self, run: Run, doing: str) -> Run:
        """Train `work`, under the plan or switch in force on it, in turns with the plain loop.

        Returns `run` with the measured peak, the times, and the comparison of bits.
        """
        plain, loop = Loop(self._plain), Loop(self.work)
        with self.pace.stage(doing, self._steps_of_a_run):
            for pair in range(self.pace.steps):
                for one in (plain, loop) if pair % 2 == 0 else (loop, plain):
                    one.step()
                    self.pace.through()
            expected, trained = plain.result(), loop.result()
            self.exclude_from_entry()
            peak_bytes = _measure_next_peak(loop)
        return replace(
            run,
            measured_peak_bytes=peak_bytes,
            losses=trained.losses,
            step_ms=trained.step_ms,
            plain_step_ms=expected.step_ms,
            time_ratio=trained.fastest_ms / expected.fastest_ms,
            same=Same(
                losses=[loss.hex() for loss in trained.losses] == [loss.hex() for loss in expected.losses],
                gradients=trained.gradients == expected.gradients,
                state=trained.state == expected.state,
            ),
            differences=trained.differences(expected),
        )

    def exclude_from_entry(self) -> None:
        """Exclude each copy, which now has gradients and optimizer state, from measurements of the other."""
        self.work.exclude_from_entry()
        self._plain.exclude_from_entry()

    def skip(self) -> None:
        """Advance the progress past the steps of a run that is left out."""
        self.pace.skip(self._steps_of_a_run)

    @property
    def _steps_of_a_run(self) -> int:
        return 2 * self.pace.steps + 1


def _measure_next_peak(loop: Loop) -> int:
    """Run one more step after the loop, and return its peak in bytes, with parameters and other memory from before it.

    The step is not counted in the loop's results.
    """
    work, batch = loop.work, loop.batch
    static, addresses = static_bytes(work.model, batch, (work.optimizer,))
    with make_recorder(find_device(work.model)) as recorder:
        work.step(batch)
    return with_others(static, addresses, recorder).total + Timeline(recorder.stream).peak_bytes


class _Pace:
    """A counter of steps that reports progress."""

    def __init__(self, work: Workload, watch: Watch, *, runs: int, steps: int) -> None:
        self.work, self.watch = work, watch
        self.steps = steps
        """Steps of each run."""
        self.runs = runs
        """Number of runs other than the plain one."""
        self._skipped = 0
        self._doing = ""
        self._done, self._stop = 0, 0

    def step(self, batch: Any) -> Tensor:
        """Run and count a step of the workload."""
        loss = self.work.step(batch)
        self.through()
        return loss

    def through(self, *_: object) -> None:
        """Count a step and report it, unless the stage's number of steps is reached already."""
        self._done = min(self._done + 1, self._stop)
        self._tell()

    def skip(self, steps: int) -> None:
        self._skipped += steps
        self._tell()

    @contextmanager
    def stage(self, doing: str, steps: int) -> Iterator[None]:
        """Report progress in this block for a stage named `doing`; `steps` steps count as done when it ends."""
        self._doing, self._stop = doing, self._done + steps
        self._tell()
        try:
            yield
        finally:
            self._done = self._stop
            self._tell()

    def _tell(self) -> None:
        n_steps = 2 * self.steps + 1
        total = _REHEARSING + self.steps + 1 + self.runs * n_steps + (self.runs - 1) * _FITTING - self._skipped
        self.watch(self._doing, self._done, total)
