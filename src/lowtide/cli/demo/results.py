"""Results of the demo: a record for the plain loop and for each other way to train."""

from dataclasses import dataclass, replace
from typing import Literal

from lowtide.planner.records import Plan, Profile, Static
from lowtide.planner.serialization import Record
from lowtide.report.run_record import Proof, RunRecord, Trained, build_record, with_frontier


@dataclass(frozen=True, slots=True, kw_only=True)
class Same(Record):
    """Comparison of a run's bits with those of the plain loop."""

    losses: bool
    gradients: bool
    """True if all gradients of every step are equal."""
    state: bool
    """True if parameters, buffers, optimizer state and random numbers are equal after the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Record):
    """One way to train. A run that was not trained has a `refusal`, and neither peak nor times."""

    kind: Literal["plain", "budget", "checkpoint"]
    name: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    """Peak of a step, static memory included, as in the budget."""
    losses: tuple[float, ...] = ()
    step_ms: tuple[float, ...] = ()
    plain_step_ms: tuple[float, ...] = ()
    """Times of the plain loop, which took turns with this run."""
    time_ratio: float | None = None
    """Ratio of the fastest step's time to that of the fastest plain step."""
    same: Same | None = None
    """Comparison with the plain run; None for the plain run itself."""
    differences: tuple[str, ...] = ()
    drifted: tuple[str, ...] = ()
    """Addresses of saved tensors that differed from the plan's expectation, and were kept."""
    plan: Plan | None = None
    refusal: str | None = None
    smallest_peak_bytes: int | None = None
    """Smallest peak of any plan; known if no plan fits the budget."""

    @property
    def identical(self) -> bool:
        return self.same is not None and self.same.losses and self.same.gradients and self.same.state

    @property
    def within_budget(self) -> bool:
        """Return True if the run was trained and, if it has a budget, its peak was within the budget."""
        if self.measured_peak_bytes is None:
            return False
        return self.budget_bytes is None or self.measured_peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Record):
    """All results of the demo. `runs` begins with the plain loop."""

    versions: dict[str, str]
    model: str
    description: str
    optimizer: str
    batch: str
    """Shapes and dtypes."""
    device: str
    threads: int
    steps: int
    items: str
    items_per_step: int
    static: Static
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    profile: Profile | None = None
    """The rehearsed step that all plans are made from."""

    @property
    def plain(self) -> Run:
        return self.runs[0]

    @property
    def wrong(self) -> tuple[Run, ...]:
        """Runs whose results are not bit-identical to the plain loop's, or whose peak is above the budget."""
        return tuple(run for run in self.runs if run.same is not None and not (run.identical and run.within_budget))

    def to_record(self, command: str) -> RunRecord:
        """Return a RunRecord, from which reports are made: the run with the smallest peak, next to all others."""
        planned = [run for run in self.runs if run.plan is not None and run.measured_peak_bytes is not None]
        shown = min(planned, key=lambda run: run.measured_peak_bytes or 0, default=None)
        proof = None
        if shown is not None:
            negation = "" if shown.identical else "NOT "
            proof = Proof(
                measured_peak_bytes=shown.measured_peak_bytes,
                is_within_budget=shown.within_budget,
                text="losses, gradients, parameters, buffers, optimizer state and random numbers of "
                f"{self.steps} steps are {negation}the plain loop's, bit by bit",
                is_proven=shown.identical,
                planned_ms=None if shown.time_ratio is None else min(shown.step_ms),
                plain_ms=min(shown.plain_step_ms, default=None),
            )
        trained = tuple(
            Trained(
                name=run.name,
                budget_bytes=run.budget_bytes,
                predicted_peak_bytes=run.predicted_peak_bytes,
                measured_peak_bytes=run.measured_peak_bytes,
                time_ratio=run.time_ratio,
                is_identical=None if run.same is None else run.identical,
                refusal=run.refusal,
            )
            for run in self.runs
        )
        plan = None if shown is None else shown.plan
        made = build_record(command, profile=self.profile, plan=plan, proof=proof, trained=trained, notes=self.notes)
        return with_frontier(replace(made, subject=self.description))

    @property
    def unreached(self) -> tuple[Run, ...]:
        """Runs whose budget no plan fits."""
        return tuple(run for run in self.runs if run.kind == "budget" and run.refusal is not None)
