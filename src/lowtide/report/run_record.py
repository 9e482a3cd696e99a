"""The record of one run, which holds the contents of its report. It needs no torch, so any machine can render it.

A `RunRecord` is written by `--report FILE.json` of `lowtide run`, `rehearse`, `estimate`, `watch` and `demo`, and
returned by `to_record()` of a Fitted object. `lowtide report` renders it as a page.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import msgspec

from lowtide.planner.budget_frontier import Frontier, frontier
from lowtide.planner.records import Fingerprint, Plan, Profile
from lowtide.planner.serialization import FORMAT, Record
from lowtide.report.finding import Finding
from lowtide.report.step_memory import StepMemory, predict_memory
from lowtide.utils.rendering import text_of

N_BUDGETS = 10
"""Number of budgets for which a report makes plans."""
LARGEST_PLANNED = 3_000
"""Largest number of saved tensors of a step for which a report makes plans for other budgets, which takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(Record):
    """Measurements of the step under a plan, and the result of comparing it with the step without a plan."""

    measured_peak_bytes: int | None
    """Peak of the step under the plan, including memory from before the step; in reserved bytes if the plan's budget is
    for reserved bytes. None if no step was measured.
    """
    is_within_budget: bool
    text: str
    """Result of the comparison, in words."""
    is_proven: bool | None = None
    """True if all results were compared and are bit-identical, False if some differ; None if only recomputed tensors
    were compared.
    """
    planned_ms: float | None = None
    """Measured time of a step under the plan."""
    plain_ms: float | None = None
    """Measured time of a step without a plan."""

    @property
    def extra(self) -> float | None:
        """Measured extra time as a share of the step without a plan; None if not measured."""
        return self.planned_ms / self.plain_ms - 1 if self.planned_ms is not None and self.plain_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeeds(Record):
    """Memory that a step needs on a GPU with one batch size."""

    batch: int | None
    gpu: str
    gpu_bytes: int
    verdict: str
    is_sure: bool
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    least_reserved_bytes: int
    most_reserved_bytes: int
    left_bytes: int
    smallest_gpu: str | None
    allocator: str
    peak_of: str = ""
    """Step or pass in which `peak_requested_bytes` is reached, and the workspaces included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Record):
    """One of several ways to train that were compared: a row in the table of `lowtide demo`."""

    name: str
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    time_ratio: float | None = None
    is_identical: bool | None = None
    """True if all results are bit-identical to those of the plain loop; None for the plain loop itself."""
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Record):
    """All recorded data about one run of a script or command. Reports are rendered from it."""

    command: str
    """The command that repeats the run."""
    versions: dict[str, str]
    """Package -> version, and the platform."""
    refusal: str = ""
    """The error message if no plan fits the budget."""
    subject: str = ""
    """Title of the report: the script, or empty for the model's name."""
    fingerprint: Fingerprint | None = None
    """Model, batch, device and torch; None for a run that was only watched."""
    profile: Profile | None = None
    plan: Plan | None = None
    before: StepMemory | None = None
    """Memory of the step without a plan."""
    after: StepMemory | None = None
    """Memory of the step under the plan."""
    proof: Proof | None = None
    frontier: Frontier | None = None
    plain_budget_bytes: int | None = None
    """Budget with which the step is compared if there is no plan; None if there is no such budget."""
    needs: tuple[GpuNeeds, ...] = ()
    trained: tuple[Trained, ...] = ()
    findings: tuple[Finding, ...] | None = None
    """Memory that outlives its step; None if the run did not watch for it."""
    n_steps: int | None = None
    """Number of steps that were watched."""
    measured: tuple[str, ...] = ()
    predicted: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def budget_bytes(self) -> int | None:
        return self.plain_budget_bytes if self.plan is None else self.plan.budget_bytes

    @property
    def requested_budget_bytes(self) -> int | None:
        """Budget in requested bytes, the unit of all memory over the step.

        None if there is no budget, or if it bounds reserved bytes.
        """
        return self.budget_bytes if self.plan is None or self.plan.budget_for == "requested" else None

    @property
    def plain_peak_bytes(self) -> int | None:
        """Peak of the step without a plan: the measured one if there is one, else the predicted one."""
        if self.profile is not None and self.profile.measured_plain_peak_bytes is not None:
            return self.profile.measured_plain_peak_bytes
        if self.plan is not None:
            return self.plan.plain.peak_bytes
        if self.before is not None:
            return self.before.peak_bytes
        return None if self.frontier is None else self.frontier.plain_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the step in requested bytes, under its plan if there is one; None if unknown.

        It is the measured peak if there is one, else the predicted peak.
        """
        if self.plan is not None and self.plan.budget_for == "reserved":
            return self.plan.predicted.peak_bytes
        if self.proof is not None and self.proof.measured_peak_bytes is not None:
            return self.proof.measured_peak_bytes
        return self.plain_peak_bytes if self.plan is None else self.plan.predicted.peak_bytes

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Measured peak of reserved bytes; None if the budget is for requested bytes."""
        if self.proof is None or self.plan is None or self.plan.budget_for == "requested":
            return None
        return self.proof.measured_peak_bytes

    @property
    def extra(self) -> float | None:
        """Predicted extra time as a share of the step without a plan; None without a plan, or if no step was timed."""
        if self.plan is None or not self.plan.step_ms:
            return None
        return self.plan.predicted.extra_ms / self.plan.step_ms

    def __str__(self) -> str:
        return text_of(self)

    def _written(self) -> object:
        fields: dict[str, Any] = {"format": self.format, **msgspec.to_builtins(self)}
        if self.plan is not None:
            fields["plan"] = self.plan._written()
        return fields

    @classmethod
    def _read(cls, text: bytes) -> Self:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        plan = fields.pop("plan", None)
        made = msgspec.json.decode(msgspec.json.encode(fields), type=cls)
        for memory in (made.before, made.after):
            if memory is not None:
                memory.check()
        if plan is not None and bytes(plan) != b"null":
            made = replace(made, plan=Plan._read(bytes(plan)))
        return made


def build_record(
    command: str,
    *,
    profile: Profile | None = None,
    plan: Plan | None = None,
    proof: Proof | None = None,
    trained: tuple[Trained, ...] = (),
    notes: Iterable[str] = (),
) -> RunRecord:
    """Build the record of a rehearsed step and its plan, if there is one.

    Args:
        command: The command that repeats the run.
        profile: The rehearsed step.
        plan: The plan in force, made from `profile` if that is given.
        proof: Measurements under the plan.
        trained: Ways to train that were compared.
        notes: Remarks in addition to the notes of profile and plan.
    """
    made_for = plan.fingerprint if plan is not None else None if profile is None else profile.fingerprint
    measured, predicted = [], []
    if profile is not None:
        measured.append("memory of each saved tensor, and the time to compute it again, in a rehearsed step")
        if profile.measured_plain_peak_bytes is not None:
            measured.append("peak of the plain step")
        else:
            predicted.append("peak of the plain step, which was not run")
        predicted.append("memory over the step, before and after, from the rehearsed step")
    if profile is not None and profile.graphs:
        predicted.append(
            "memory inside compiled graphs, whose buffers inductor schedules itself: peaks in the chart may be off by "
            "some percent"
        )
    if plan is not None:
        predicted.append("extra time of the plan, from the times of the rehearsal")
        if proof is not None and proof.measured_peak_bytes is not None:
            measured.append("peak of the step under the plan")
    lines = [*(plan.notes if plan is not None else () if profile is None else profile.notes), *notes]
    return RunRecord(
        command=command,
        versions=versions(made_for),
        fingerprint=made_for,
        profile=profile,
        plan=plan,
        before=None if profile is None else predict_memory(profile),
        after=None if profile is None or plan is None else predict_memory(profile, plan.decisions),
        proof=proof,
        trained=trained,
        measured=tuple(measured),
        predicted=tuple(predicted),
        notes=tuple(dict.fromkeys(lines)),
    )


def with_frontier(run: RunRecord) -> RunRecord:
    """Return the run with plans for other budgets (its frontier). Making them takes some seconds.

    The same run is returned if it has a frontier already or no profile, or if its step has compiled graphs or too many
    saved tensors.
    """
    profile = run.profile
    if run.frontier is not None or profile is None or profile.graphs or len(profile.slots) > LARGEST_PLANNED:
        return run
    return replace(run, frontier=frontier(profile, n_budgets=N_BUDGETS))


def with_step_time(run: RunRecord, planned_ms: float | None) -> RunRecord:
    """Return the run with the measured time of a step under its plan; the same run if `planned_ms` is None.

    If the step without a plan was not timed, its time is computed: the measured time minus the plan's extra time.
    """
    if planned_ms is None or run.proof is None or run.plan is None:
        return run
    proof = replace(run.proof, planned_ms=planned_ms)
    timed = replace(run, proof=proof, measured=(*run.measured, "mean time of a step under the plan"))
    plan = run.plan.timed_by(planned_ms)
    if plan is run.plan:
        return timed
    return replace(
        timed,
        plan=plan,
        profile=None if run.profile is None else replace(run.profile, step_ms=plan.step_ms),
        predicted=(*run.predicted, "time of the plain step: that of a step under the plan, less the extra time"),
    )


def versions(made_for: Fingerprint | None = None) -> dict[str, str]:
    """Return the versions of Lowtide, Python and torch, and the platform.

    If `made_for` is given, the version of torch is the one recorded there.
    """
    from lowtide import __version__

    packages = {"lowtide": __version__, "python": platform.python_version()}
    if made_for is not None:
        packages["torch"] = made_for.torch
    else:
        with contextlib.suppress(PackageNotFoundError):
            packages["torch"] = version("torch")
    return {**packages, platform.system(): platform.machine()}
