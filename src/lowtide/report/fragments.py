"""Render records as HTML, for the output of a notebook cell or as a standalone page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.planner.budget_frontier import Frontier
from lowtide.planner.records import Plan, Profile
from lowtide.report.page import (
    alternatives,
    asset,
    decided,
    document,
    fits,
    memory,
    obtained,
    outlives,
    render_run_page,
)
from lowtide.report.pictures import escape
from lowtide.report.run_record import RunRecord, build_record
from lowtide.report.run_text import about
from lowtide.report.step_memory import StepMemory, read_recorded_memory

Section = tuple[str, str, str]
"""Id, heading and HTML."""


def fragment(record: object) -> str:
    """Return HTML for the output of a notebook cell: pictures and tables if `record` has any, else its text."""
    sections = _build_sections(record)
    body = "".join(f"<section><h3>{heading}</h3>{html}</section>" for _, heading, html in sections)
    return (
        f'<style>{asset("page.css")}</style><div class="lt lt-notebook">{body}</div><script>{asset("page.js")}</script>'
    )


def page(record: object) -> str:
    """Return a standalone HTML page for a record."""
    if isinstance(record, RunRecord):
        return render_run_page(record)
    run = _make_run_record(record)
    return render_run_page(run) if run is not None else document(type(record).__name__, "", _build_sections(record))


def _make_run_record(record: object) -> RunRecord | None:
    """Convert `record` to a RunRecord. Return None if it can't be converted."""
    if isinstance(record, RunRecord):
        return record
    if isinstance(record, Profile):
        return build_record("lowtide.rehearse(model, step, batch)", profile=record)
    if isinstance(record, Plan):
        return build_record("lowtide.plan(profile, budget)", plan=record)
    to_record: Callable[[], object] | None = getattr(record, "to_record", None)
    made = None if to_record is None else to_record()
    return made if isinstance(made, RunRecord) else None


def _build_sections(record: object) -> list[Section]:
    if isinstance(record, Frontier):
        return [("else", f"What each budget costs: {escape(record.fingerprint.model)}", alternatives(record, None))]
    if isinstance(record, StepMemory):
        return [("memory", "Where memory goes", memory(record, None))]
    if (timeline := _find_timeline(record)) is not None:
        shown = read_recorded_memory(timeline, "measured")
        return [("memory", "Where memory goes", memory(shown, None)), ("text", "In words", _format_text(record))]
    run = _make_run_record(record)
    if run is None:
        return [("text", type(record).__name__, _format_text(record))]
    sections = [
        ("fits", escape(about(run)) or "Does it fit?", fits(run)),
        ("memory", "Where memory goes", memory(run.before, run.after, run.requested_budget_bytes)),
        ("decided", "What Lowtide decided", decided(run) if run.plan is not None else ""),
        ("outlives", "What outlives its step", outlives(run) if run.findings is not None else ""),
    ]
    if isinstance(record, RunRecord):
        sections += [
            ("else", "What other budgets cost", alternatives(run.frontier, run.plan)),
            ("how", "How this was obtained", obtained(run)),
        ]
    return [section for section in sections if section[2]]


def _find_timeline(record: object) -> Any:
    """Return the timeline of an object that `measure` or `timeline` returned; None for other objects."""
    from lowtide.memory.memory_timeline import Timeline

    if isinstance(record, Timeline):
        return record
    recorded = getattr(record, "recorded", None)
    return recorded if isinstance(recorded, Timeline) else None


def _format_text(record: object) -> str:
    return f'<pre tabindex="0">{escape(record)}</pre>'
