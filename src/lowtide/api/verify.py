"""Verify a plan: run a step under the plan and without it, from the same state, and compare both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lowtide._torch.device_timing import now_ms
from lowtide._torch.inductor import always_partitioned, kernels_left_out
from lowtide.api.apply import apply
from lowtide.levers import enable, find_lever
from lowtide.memory.device_budget import check_on_device
from lowtide.planner.records import Plan
from lowtide.planner.serialization import Record
from lowtide.profiler.peak_margin import measure_peaks_with_all_blocks, recorded_peak
from lowtide.profiler.preconditions import check_can_rehearse
from lowtide.profiler.trial_updates import Updates
from lowtide.report.run_record import Proof
from lowtide.report.text_table import listed
from lowtide.runtime.fingerprint import check_made_for, find_device
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.state.observed_changes import describe_unrestored
from lowtide.state.process_group import check_waits_for_no_process, n_sent
from lowtide.state.step_arguments import accept_batch
from lowtide.state.step_outcome import Outcome, find_varying_results, is_out_of_memory, without
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.units import format_apart, format_bytes, format_ratio, format_time
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.interrupts import interrupts_delayed
from lowtide.utils.progress import Stage, advance, showing

if TYPE_CHECKING:
    from torch import nn

DRAWN = "random numbers"
"""Kind of result for the states of random number generators. This kind alone proves little: a step that draws no
numbers leaves the states unchanged.
"""

_RUNS: Final = 4
"""Progress of a verification, in units: a planned step to compare, another to measure, a third to time, and the plain
steps.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(Record):
    """Memory, time and results of a step under a plan, compared with the plain step."""

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    """Peak of the step under the plan, static memory included; in reserved bytes if the budget is for those."""
    budget_for: BudgetFor = "requested"
    planned_ms: float
    plain_ms: float | None
    """Time of the plain step; None if it does not fit in memory."""
    predicted_extra: float | None = None
    """Extra time that the plan predicts, as a share of the rehearsed step's; None if no time was measured."""
    differences: dict[str, tuple[str, ...]] | None
    """Names of results whose bits differ from the plain step's, by kind.

    Kinds are random numbers, and those that the step has produced or changed: loss (the step's return value),
    gradients, parameters, buffers, optimizer state and counters (integers and strings that Python holds). None if the
    plain step does not fit in memory; then the proof is that the rehearsal compared recomputed tensors with the
    originals.
    """
    levers: tuple[str, ...] = ()
    """Levers of the plan that are not exact. `differences` then compares with the step that has these levers alone."""
    relative_differences: dict[str, float] | None = None
    """With inexact levers, the distance of loss, gradients and parameters from the plain step's: the Euclidean norm of
    all differences of a kind, divided by the norm of the plain step's values. None without such levers, or if the plain
    step does not fit in memory.
    """
    nondeterministic: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names from `differences`, by kind, that can't be compared: their bits also differ between plain steps from the
    same state, or are computed from such results. The cause may be a CUDA kernel that adds up in an order that varies
    between runs.
    """
    audited: bool = True
    """True if the rehearsal compared each recomputed tensor with the original; False for a plan for compiled code."""
    drifted: tuple[str, ...] = ()
    """Addresses of saved tensors, such as `h.0.mlp#0:1`, that were kept because they differed from the rehearsal's."""
    changes: tuple[str, ...] = ()
    """Changes made by the verifying steps that can't be restored, such as the position of an iterator."""

    @property
    def within_budget(self) -> bool:
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def measured_extra(self) -> float | None:
        """Extra time of the planned step, as a fraction of the plain step's time; None if that was not measured."""
        return self.planned_ms / self.plain_ms - 1 if self.plain_ms else None

    @property
    def identical(self) -> bool:
        """Return True if all comparable results are the plain step's, bit for bit.

        With inexact levers, results are compared with the step that has these levers alone.
        """
        return not self.differing

    @property
    def differing(self) -> tuple[str, ...]:
        """Kinds of results that should be bit-identical and are not."""
        return tuple(self.comparable_differences)

    @property
    def comparable_differences(self) -> dict[str, tuple[str, ...]]:
        """Names of results whose bits differ from the plain step's, by kind, except those in `nondeterministic`."""
        return without(self.differences or {}, self.nondeterministic)

    @property
    def proven(self) -> bool:
        """Return True if a result of the step was compared with the plain step, and all compared results are the same.

        If the plain step does not fit in memory, return `audited`.
        """
        return self.audited if self.differences is None else bool(self.identical and {*self._same} - {DRAWN})

    def to_proof(self) -> Proof:
        """Return the proof that a report shows: peak, times, and the text of the comparison with the plain step."""
        return Proof(
            measured_peak_bytes=self.measured_peak_bytes,
            is_within_budget=self.within_budget,
            text=self.proof,
            is_proven=None if self.differences is None and self.audited else self.proven,
            planned_ms=self.planned_ms,
            plain_ms=self.plain_ms,
        )

    @property
    def _same(self) -> list[str]:
        """Kinds of results that do not vary between plain steps, so that they can be compared."""
        return [kind for kind in self.differences or {} if kind not in self.nondeterministic]

    @property
    def proof(self) -> str:
        """The result of the comparison with the plain step, as text, and the state that could not be restored."""
        return f"{self._compared}; {describe_unrestored(self.changes)}" if self.changes else self._compared

    @property
    def _compared(self) -> str:
        base, apart = "the plain step", ""
        if self.levers:
            base = f"the step with {'that lever' if len(self.levers) == 1 else 'those levers'} alone"
            relative = (self.relative_differences or {}).items()
            apart = ", ".join(f"{kind} {difference:.1e}" for kind, difference in relative)
            apart = f"; relative differences from the plain step: {apart}" if apart else ""
        audited = "; every recipe and replay was compared with the original tensors, bit by bit" if self.audited else ""
        if self.differences is None:
            return f"the plain step does not fit{audited}" if audited else "NOT PROVEN: the plain step does not fit"
        if self.differing:
            return f"NOT bit-identical to {base}: {listed(self.differing)}"
        if not self.proven:
            nothing = f"{base} is not deterministic, so nothing can be compared with it"
            if not self.nondeterministic:
                nothing = "the step has no result to compare: no loss, no gradients, no update"
            return f"NOT PROVEN: {nothing}{audited}"
        varying = [self._varying(kind) for kind in self.nondeterministic]
        nondeterministic = f"; it is not deterministic in its {listed(varying)}" if varying else ""
        return f"bit-identical to {base}: {listed(self._same)}{nondeterministic}{apart}"

    def _varying(self, kind: str) -> str:
        """Format a kind of result that varies between plain steps, and so can't be compared: `loss (2 differ)`.

        The number counts the results of this kind that vary.
        """
        names = self.nondeterministic[kind]
        return f"{kind} (1 differs: {names[0]})" if len(names) == 1 else f"{kind} ({len(names)} differ)"

    def __str__(self) -> str:
        budget, measured = format_apart(self.budget_bytes, self.measured_peak_bytes)
        relation = "within" if self.within_budget else "OVER"
        peak = "reserved peak" if self.budget_for == "reserved" else "peak"
        lines = [f"{measured} {peak} measured: {relation} the budget of {budget}"]
        if self.predicted_extra is not None:
            measured_extra = self.measured_extra
            beside = (
                f"{format_time(self.planned_ms)} a step"
                if measured_extra is None
                else format_ratio(measured_extra, signed=True)
            )
            lines.append(f"extra time: {format_ratio(self.predicted_extra, signed=True)} predicted, {beside} measured")
        return "\n".join([*lines, self.proof])


def verify(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    plan: Plan,
    *,
    optimizer: Optimizers = None,
    budget_for: BudgetFor | None = None,
    progress: bool = True,
) -> Verdict:
    """Run `step(batch)` under `plan` and without it, and compare peak, loss, gradients, state and random numbers.

    The peak is measured in a second step, when the optimizer has its state, with the random numbers of the first step.
    It includes the updates that follow the step. If random numbers decide the step's work, it is the largest peak of
    several steps. All state is restored. If some levers of the plan are not exact, the step is also run with these
    levers and without the rest of the plan.

    Args:
        model: The model, without a plan applied.
        step: Runs forward and backward of `model`, and optionally the optimizer. It is called with the batch, or with
            the items of a tuple or list as separate arguments.
        batch: The batch that the plan was made for.
        plan: The plan to verify.
        optimizer: The optimizer, or a list of them; needed if one of the plan's levers changes it.
        budget_for: The bytes to compare with the budget: "requested" ones, or on a GPU "reserved" ones, which also
            count memory that the allocator reserves beyond the requests. By default the kind that the plan was made
            for.
        progress: If False, no bar is shown on stderr; the log named "lowtide" has a line.

    Returns:
        The verdict: peaks in bytes, times of a step in ms, and the differences by kind of result.

    Raises:
        BudgetError: If `budget_for` is "reserved" on a CPU.
        StalePlan: If the plan is for another model, batch or device.
        RehearsalError: If the step can't be rehearsed.
        LowtideError: If a plan is in force already, or a lever of this plan can't be enabled.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> plan = lowtide.plan(lowtide.rehearse(model, step, batch), "90%")
        >>> verdict = lowtide.verify(model, step, batch, plan)
        >>> verdict.identical, verdict.within_budget
        (True, True)
    """
    Plan.expect(plan, "verify")
    judged = plan if budget_for is None else replace(plan, budget_for=budget_for)
    with showing(progress):
        return compare_with_plain(model, step, batch, judged, optimizer)


@interrupts_delayed()
def compare_with_plain(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    plan: Plan,
    optimizer: Optimizers,
    *,
    copies: bool = False,
) -> Verdict:
    """Run the step under `plan` and without it, compare both, and return the verdict; progress shows this as one stage.

    With `copies`, or with inexact levers, results are copied, so that the verdict has relative differences.
    """
    step = accept_batch(step, batch)
    check_can_rehearse(model, step, batch)
    check_on_device(plan.budget_bytes, find_device(model), plan.budget_for)
    check_made_for(plan.fingerprint, model, batch)
    inexact = tuple(lever for lever in plan.levers if not lever.exact)
    copies = copies or bool(inexact)
    name = type(model).__name__
    with (
        Stage(f"verifying the plan for {name}", total=_RUNS + plan.draws) as stage,
        StepSnapshot(model, batch, optimizer, step) as snapshot,
        Updates(snapshot, model, optimizer) as updates,
    ):
        step = updates.step
        outcome = partial(Outcome.of, model, counts=snapshot.counts)
        untouched = outcome(lambda _: None, batch)
        planned = _run_planned(model, updates, batch, plan, optimizer, snapshot, copies=copies)
        snapshot.restore(empties_caches=True)
        advance()
        plain, plain_ms = _run_plain(model, step, batch, snapshot, copies=copies)
        expected = plain
        if inexact:
            snapshot.restore(empties_caches=True)
            with enable(model, inexact, optimizer):
                expected, _ = _run_plain(model, step, batch, snapshot)
        differences = None if expected is None else _find_differences(plan, untouched, planned.outcome, expected)

        def repeat_expected() -> Outcome:
            snapshot.restore(empties_caches=True)
            with enable(model, inexact, optimizer):
                return outcome(step, batch)

        advance()
        nondeterministic = (
            {} if expected is None else find_varying_results(expected, differences or {}, repeat_expected)
        )
        stage.result = f"verified the plan for {name}: {format_bytes(planned.peak_bytes)} peak measured"
    return Verdict(
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=planned.peak_bytes,
        budget_for=plan.budget_for,
        planned_ms=planned.ms,
        plain_ms=plain_ms,
        predicted_extra=plan.predicted.extra_ms / plan.step_ms if plan.step_ms else None,
        differences=differences,
        levers=tuple(lever.name for lever in inexact),
        relative_differences=plain.relative_differences(planned.outcome) if copies and plain is not None else None,
        nondeterministic=nondeterministic,
        audited=not plan.graphs,
        drifted=planned.drifted,
        changes=snapshot.changes,
    )


@interrupts_delayed()
def measure_scheduled_peak(
    model: nn.Module, step: Callable[..., Any], batch: Any, plan: Plan, optimizer: Optimizers
) -> int | None:
    """Measure the peak of a step under a plan for compiled code without compiling kernels; return None if that fails.

    Compiling then takes seconds, and the code allocates as much as with kernels: fusion, order and reuse of buffers are
    decided before kernels are compiled. The code computes zeros, which may make a step raise. All state is restored.
    """
    with (
        StepSnapshot(model, batch, optimizer, step) as snapshot,
        Updates(snapshot, model, optimizer) as updates,
        kernels_left_out(),
        always_partitioned(),
        apply(model, plan, optimizer=optimizer, say=lambda what: None),
    ):
        try:
            updates.run(batch)
            updates.undo()
            snapshot.restore_for_rerun()
            return recorded_peak(model, updates, batch, snapshot)
        except Exception:  # the caller compiles the kernels then
            return None


class _PlannedRun(NamedTuple):
    """Measurements of the steps that a verification runs under the plan; `drifted` is as in Verdict."""

    outcome: Outcome
    peak_bytes: int
    ms: float
    drifted: tuple[str, ...]


def _run_planned(
    model: nn.Module,
    updates: Updates,
    batch: Any,
    plan: Plan,
    optimizer: Optimizers,
    snapshot: StepSnapshot,
    *,
    copies: bool,
) -> _PlannedRun:
    """Run steps under the plan: one to compare its results, others to measure the peak, and one to measure the time."""
    with apply(model, plan, optimizer=optimizer) as applied:
        outcome = Outcome.of(model, updates.step, batch, copies=copies, counts=snapshot.counts)
        advance()
        updates.follow()
        updates.undo()
        peaks = _measure_peaks(model, updates, batch, snapshot, plan)
        snapshot.restore_for_rerun()
        ms = _time_step(model, updates.step, batch)  # not recorded, like the plain step: recording takes time
    return _PlannedRun(outcome, max(peaks), ms, tuple(sorted(applied.drifted)))


def _run_plain(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, snapshot: StepSnapshot, *, copies: bool = False
) -> tuple[Outcome | None, float | None]:
    """Return the outcome of a step without the plan, and the time of another such step in ms; None, None if out of
    memory.
    """
    try:
        outcome = Outcome.of(model, step, batch, copies=copies, counts=snapshot.counts)
        snapshot.restore_for_rerun()
        return outcome, _time_step(model, step, batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None, None


def _measure_peaks(model: nn.Module, updates: Updates, batch: Any, snapshot: StepSnapshot, plan: Plan) -> list[int]:
    """Measure the peaks of further steps under the plan in force: several steps if random numbers decide the work."""
    sent = n_sent()
    snapshot.restore_for_rerun()
    measured = partial(recorded_peak, model, updates, batch, snapshot, plan.budget_for)
    peaks = [measured() for _ in range(1 + plan.draws)]
    if plan.draws:
        peaks += measure_peaks_with_all_blocks(measured)
    check_waits_for_no_process(sent)
    return peaks


def _find_differences(
    plan: Plan, untouched: Outcome, planned: Outcome, expected: Outcome
) -> dict[str, tuple[str, ...]]:
    """Return the names of the results whose bits differ between `planned` and `expected`, by kind of result.

    A kind is compared if one of the two steps has produced or changed a result of it, and no lever of the plan makes it
    unavailable. `untouched` is the outcome before any step.
    """
    made = {*planned.made(untouched), *expected.made(untouched), DRAWN}
    hidden = {kind for lever in plan.levers for kind in find_lever(lever.name).unavailable_results}
    return {kind: names for kind, names in expected.differences(planned).items() if kind in made - hidden}


def _time_step(model: nn.Module, step: Callable[[Any], Any], batch: Any) -> float:
    device = find_device(model)
    began = now_ms(device)
    step(batch)
    return now_ms(device) - began
