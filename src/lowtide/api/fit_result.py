"""Results of a fit: the plan in force, with its proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from lowtide.api.apply import Applied
from lowtide.api.shape_buckets.dispatch import Switched, SwitchingEngine
from lowtide.api.shape_buckets.fit_buckets import Bucket
from lowtide.api.verify import Verdict
from lowtide.errors import LowtideError
from lowtide.planner.records import Decisions, Plan, Profile
from lowtide.report.run_record import RunRecord, build_record
from lowtide.report.text_table import decisions, format_extra_time, format_lever_lines
from lowtide.units import format_bytes, format_change, format_time
from lowtide.utils.removable import Removable
from lowtide.utils.rendering import Displayed, format_repr

if TYPE_CHECKING:
    from torch import nn


class Fitted(Removable, Displayed):
    """A plan in force on a model, and the proof that the model's step keeps to its budget.

    `print` shows both. `remove()`, or the end of a `with` block, restores the model.
    """

    def __init__(self, applied: Applied | Switched, profile: Profile, plan: Plan, verdict: Verdict) -> None:
        self.applied = applied
        applied.holder = self
        self.profile = profile
        self.plan = plan
        self.verdict = verdict

    def remove(self) -> None:
        """Remove the plan, which restores the model."""
        self.applied.remove()

    def __reduce__(self) -> NoReturn:
        raise LowtideError(
            f"a {type(self).__name__} is a plan in force on one model, and can't be copied or pickled. Copy the "
            "model (the copy has no plan) and apply the plan to it: lowtide.apply(copy, fitted.plan). "
            "fitted.plan.to_json(path) saves the plan."
        )

    def __repr__(self) -> str:
        peak, proven = _format_peak(self.plan, self.verdict), "proven" if self.verdict.proven else "NOT proven"
        return format_repr(type(self).__name__, f"{self.plan.fingerprint.model}: {peak}, {proven}")

    def to_record(self, command: str = "") -> RunRecord:
        """Return the results of this fit as a RunRecord, from which reports are made.

        Args:
            command: Code that repeats the fit; a call of `lowtide.fit` by default.
        """
        call = command or f"lowtide.fit(model, step, batch, budget={self.plan.budget_bytes})"
        return build_record(call, profile=self.profile, plan=self.plan, proof=self.verdict.to_proof())

    def __str__(self) -> str:
        plan, verdict = self.plan, self.verdict
        return self._with_proof(
            [f"{_format_peak(plan, verdict)}{_format_time(plan, verdict)}", decisions(plan), *format_lever_lines(plan)]
        )

    def _with_proof(self, lines: list[str]) -> str:
        """Join `lines`, the proof and the plan's notes into one text; a proof that failed comes before `lines`."""
        proof = [self.verdict.proof]
        notes = [f"note: {note}" for note in self.plan.notes]
        return "\n".join((lines + proof if self.verdict.proven else proof + lines) + notes)


class FittedSizes(Fitted):
    """Plans in force on a model, one for each range of batch sizes (bucket), with their proofs.

    `plan`, `profile` and `verdict` are those of the bucket with the largest sizes.
    """

    def __init__(self, model: nn.Module, buckets: list[Bucket]) -> None:
        last = buckets[-1]
        super().__init__(Switched(SwitchingEngine(model, buckets)), last.profile, last.plan, last.verdict)
        self.buckets = tuple(buckets)
        """Buckets, smallest sizes first."""

    def __str__(self) -> str:
        return self._with_proof([_format_in_a_line(bucket) for bucket in self.buckets])


def _format_in_a_line(bucket: Bucket) -> str:
    """Format a bucket and its plan, such as `up to [8, 128]: 612 -> 480 MiB peak (budget 480 MiB), 212 ms -> ...`."""
    plan, verdict = bucket.plan, bucket.verdict
    time = _format_time(plan, verdict) if plan.decisions != Decisions() else ""
    return f"up to {bucket.size}: {_format_peak(plan, verdict)}{time}; {decisions(plan)}"


def _format_peak(plan: Plan, verdict: Verdict) -> str:
    """Format the peak, such as `14.9 -> 7.8 GiB peak (budget 8 GiB)`."""
    budget = f"(budget {format_bytes(plan.budget_bytes)})"
    if verdict.budget_for == "reserved":  # only the requested bytes of the plain step are known
        return f"{format_bytes(verdict.measured_peak_bytes)} peak reserved {budget}"
    return f"{format_change(plan.plain.peak_bytes, verdict.measured_peak_bytes)} peak {budget}"


def _format_time(plan: Plan, verdict: Verdict) -> str:
    """Format times, such as `, 212 ms -> 223 ms a step measured, +4.1 % time predicted, bound +3.8 %`."""
    before = "" if verdict.plain_ms is None else f"{format_time(verdict.plain_ms)} -> "
    return f", {before}{format_time(verdict.planned_ms)} a step measured{format_extra_time(plan)}"
