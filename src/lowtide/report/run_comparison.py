"""Changes between two runs of one model: peak, time, decisions and findings, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import LowtideError
from lowtide.planner.records import Plan
from lowtide.report.finding import Finding
from lowtide.report.page import document, memory, obtained
from lowtide.report.pictures import escape
from lowtide.report.plan_text import show_diff
from lowtide.report.run_record import RunRecord
from lowtide.report.step_memory import StepMemory
from lowtide.report.text_table import format_added_time
from lowtide.units import format_bytes, format_ratio
from lowtide.utils.tables import Styled, Table


@dataclass(frozen=True, slots=True, eq=False)
class RunComparison:
    """Comparison of two runs of one model. Raises LowtideError if the runs are of different models."""

    first: RunRecord
    second: RunRecord
    names: tuple[str, str] = ("the first run", "the second run")

    def __post_init__(self) -> None:
        one, other = self.first.fingerprint, self.second.fingerprint
        models = [None if run is None else run.model.partition(" ")[0] for run in (one, other)]
        if models[0] != models[1]:
            what = [f"{name} is of {model or 'no model'}" for name, model in zip(self.names, models, strict=True)]
            raise LowtideError(f"{what[0]}, and {what[1]}: two runs of one model can be compared.")
        if self.peak_change is None and self.first.findings is None:
            raise LowtideError(f"{self.names[0]} has neither a peak nor findings to compare.")

    @property
    def peak_change(self) -> float | None:
        """Change of the peak from the first run to the second, as a share of the first peak; None if one is unknown."""
        one, other = self.first.peak_bytes, self.second.peak_bytes
        return other / one - 1 if one and other is not None else None

    @property
    def new_findings(self) -> tuple[Finding, ...]:
        """Findings of the second run that the first run does not have."""
        known = {(finding.code, finding.holder) for finding in self.first.findings or ()}
        return tuple(finding for finding in self.second.findings or () if (finding.code, finding.holder) not in known)

    @property
    def gone_findings(self) -> tuple[Finding, ...]:
        """Findings that only the first run has."""
        if self.second.findings is None:
            return ()
        known = {(finding.code, finding.holder) for finding in self.second.findings}
        return tuple(finding for finding in self.first.findings or () if (finding.code, finding.holder) not in known)

    def rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield a row for each difference between the runs: name, both values, and the change."""
        first, second = self.first, self.second
        sizes = [
            ("peak", first.peak_bytes, second.peak_bytes),
            ("peak of the plain step", first.plain_peak_bytes, second.plain_peak_bytes),
            ("budget", first.budget_bytes, second.budget_bytes),
        ]
        for name, one, other in sizes:
            if one is not None or other is not None:
                yield name, _size(one), _size(other), _format_change(one, other)
        categories = {**_read_parts(first), **_read_parts(second)}
        for name in categories:
            one, other = _read_parts(first).get(name, 0), _read_parts(second).get(name, 0)
            if one != other:
                yield f"{name} at the peak", _size(one), _size(other), _format_change(one, other)
        plans = first.plan, second.plan
        if any(plans):
            times = [None if plan is None else plan.predicted.extra_ms for plan in plans]
            shown = ["no plan" if plan is None else _format_extra_time(plan) for plan in plans]
            if shown[0] != shown[1]:
                yield "extra time, predicted", shown[0], shown[1], _format_change(times[0], times[1])
        for name in {**first.versions, **second.versions}:
            old, new = first.versions.get(name, "none"), second.versions.get(name, "none")
            if old != new:
                yield name, old, new, ""
        if first.fingerprint is not None and second.fingerprint is not None:
            for name in ("batch", "device"):
                old, new = getattr(first.fingerprint, name), getattr(second.fingerprint, name)
                if old != new:
                    yield name, old, new, ""

    def verdict(self) -> str:
        """Describe the change of the peak in a sentence; if a run has no peak, the numbers of new and gone findings."""
        change = self.peak_change
        if change is None:
            return f"{len(self.new_findings)} new findings, {len(self.gone_findings)} gone."
        one, other = _size(self.first.peak_bytes), _size(self.second.peak_bytes)
        if not change:
            return f"The peak is the same: {other}."
        return f"The peak went {'up' if change > 0 else 'down'}, from {one} to {other} ({_format_signed(change)})."

    def __str__(self) -> str:
        lines = [self.verdict()]
        if rows := [*self.rows()]:
            lines += Table(headings=("", *self.names, "change"), rows=rows).lines()
        if self.first.plan is not None and self.second.plan is not None:
            lines += show_diff(self.first.plan, self.second.plan).splitlines()
        lines += [
            f"new finding: {finding.code} {finding.name}, {_size(finding.held_bytes)}" for finding in self.new_findings
        ]
        lines += [f"gone: {finding.code} {finding.name}, {_size(finding.held_bytes)}" for finding in self.gone_findings]
        return "\n".join(lines)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a self-contained page of the changes; also write it to `path` if given."""
        change = self.peak_change
        kind = "plain" if not change else "no" if change > 0 else "yes"
        rows = [(name, one, other, Styled(by, f"lt-{_find_direction(by)}")) for name, one, other, by in self.rows()]
        html = f'<p class="lt-verdict is-{kind}">{escape(self.verdict())}</p>'
        html += Table(headings=("of the step", *self.names, "change"), rows=rows, is_stacked=True).html(
            "Changes, side by side"
        )
        plans = ""
        if self.first.plan is not None and self.second.plan is not None:
            plans = f'<pre class="lt-command">{escape(show_diff(self.first.plan, self.second.plan))}</pre>'
        findings = "".join(
            f"<li>{word}: <code>{escape(line.code)}</code> {escape(line.name)}, {escape(_size(line.held_bytes))}, "
            f"held by {escape(line.holder)}</li>"
            for word, group in (("new", self.new_findings), ("gone", self.gone_findings))
            for line in group
        )
        sections = [
            ("fits", "What changed", html),
            (
                "memory",
                "Where memory goes",
                memory(_memory(self.first), _memory(self.second), words=self.names),
            ),
            ("decided", "What Lowtide decided", plans),
            ("outlives", "What outlives its step", f"<ul>{findings}</ul>" if findings else ""),
            ("how", "How the second run was obtained", obtained(self.second)),
        ]
        made_for = self.second.fingerprint
        title = self.second.subject if made_for is None else made_for.model.partition(" ")[0]
        page = document(title, " and ".join(self.names), [section for section in sections if section[2]])
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


def _memory(run: RunRecord) -> StepMemory | None:
    return run.after or run.before


def _read_parts(run: RunRecord) -> dict[str, int]:
    own = _memory(run)
    return {} if own is None else own.parts_at(own.peak_moment)


def _format_extra_time(plan: Plan) -> str:
    return format_added_time(plan.predicted.extra_ms, plan.step_ms).replace(" a step", "")


def _size(n_bytes: int | None) -> str:
    return "none" if n_bytes is None else format_bytes(n_bytes)


def _format_change(one: float | None, other: float | None) -> str:
    return _format_signed(other / one - 1) if one and other is not None and other != one else ""


def _format_signed(share: float) -> str:
    return format_ratio(share, signed=True) if abs(share) >= 0.0005 else f"{'+' if share > 0 else '-'}less than 0.1 %"


def _find_direction(change: str) -> str:
    return "up" if change.startswith("+") else "down" if change.startswith("-") else "same"
