"""Export a run: SARIF and GitHub annotations of findings, CSV and a Perfetto trace of memory over the step."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from lowtide.errors import LowtideError
from lowtide.report.finding import Finding
from lowtide.report.run_record import RunRecord
from lowtide.report.step_memory import CATEGORIES, StepMemory
from lowtide.units import format_bytes

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def list_tracks(run: RunRecord) -> list[tuple[str, StepMemory]]:
    """Return the memory of a run's steps as pairs of a name (`before`, `after`) and a StepMemory.

    Raises LowtideError if the run has no such memory.
    """
    tracks = [(name, memory) for name, memory in (("before", run.before), ("after", run.after)) if memory is not None]
    if not tracks:
        raise LowtideError("this run has no memory timeline: it was watched, not rehearsed.")
    return tracks


def format_csv(run: RunRecord) -> str:
    """Return memory over time as CSV, with one row per moment of each step and one column of bytes per category."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("step", "event", "phase", "module", *CATEGORIES, "total"))
    for name, memory in list_tracks(run):
        columns = [memory.bytes.get(category, (0,) * len(memory.at)) for category in CATEGORIES]
        for moment, total in enumerate(memory.totals):
            parts = [column[moment] for column in columns]
            place = memory.at[moment], memory.phase_at(moment), memory.module_at(moment)
            rows.writerow((name, *place, *parts, total))
    return text.getvalue()


def format_perfetto_trace(run: RunRecord) -> str:
    """Return a trace in Chrome's JSON format: memory as counters, phases as slices, peaks and the budget as marks.

    One microsecond of the trace represents one event of the step.
    """
    events = [
        event
        for number, (name, memory) in enumerate(list_tracks(run), 1)
        for event in _list_trace_events(number, name, memory)
    ]
    if run.plan is not None:
        text = f"budget {format_bytes(run.plan.budget_bytes)}"
        events.append({"ph": "i", "s": "g", "name": text, "ts": 0, "pid": len(list_tracks(run)), "tid": 1})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, separators=(",", ":"))


def _list_trace_events(pid: int, name: str, memory: StepMemory) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"step {name}"}}
    for span in memory.phases:
        first = memory.at[span.first]
        stop = memory.at[span.stop] if span.stop < len(memory.at) else memory.n_events
        yield {"ph": "X", "name": span.name, "ts": first, "dur": stop - first, "pid": pid, "tid": 1}
    for moment, at in enumerate(memory.at):
        parts = {category: column[moment] for category, column in memory.bytes.items()}
        yield {"ph": "C", "name": "memory (bytes)", "ts": at, "pid": pid, "args": parts}
    peak = f"peak {format_bytes(memory.peak_bytes)}"
    yield {"ph": "i", "s": "p", "name": peak, "ts": memory.at[memory.peak_moment], "pid": pid, "tid": 1}


# --- findings


def sarif(run: RunRecord) -> str:
    """Return the findings in SARIF 2.1.0, which code hosts show next to the source lines.

    Raises LowtideError for a run that was not watched.
    """
    findings = _require_findings(run)
    rules = {finding.code: {"id": finding.code, "shortDescription": {"text": finding.name}} for finding in findings}
    results = [
        {
            "ruleId": finding.code,
            "level": "warning",
            "message": {"text": _format_message(finding)},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _to_uri(place[0])},
                        "region": {"startLine": place[1]},
                    }
                }
                for place in [_parse_place(finding)]
                if place is not None
            ],
        }
        for finding in findings
    ]
    driver = {"name": "lowtide", "version": run.versions.get("lowtide", ""), "rules": list(rules.values())}
    log = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    return json.dumps(log, indent=1)


def format_github_annotations(run: RunRecord, findings: Sequence[Finding] | None = None) -> str:
    """Return a workflow command of GitHub Actions for each finding. It annotates the finding's line.

    By default, `findings` are all findings of the run.
    """
    lines = []
    for finding in _require_findings(run) if findings is None else findings:
        place = _parse_place(finding)
        where = "" if place is None else f"file={_escape_property(place[0])},line={place[1]},"
        title = _escape_property(f"{finding.code} {finding.name}")
        lines.append(f"::warning {where}title={title}::{_escape_data(_format_message(finding))}")
    return "\n".join(lines)


def _require_findings(run: RunRecord) -> tuple[Finding, ...]:
    if run.findings is None:
        raise LowtideError(
            "this run was not watched, so it has no findings: `lowtide watch --report FILE.json SCRIPT`."
        )
    return run.findings


def _format_message(finding: Finding) -> str:
    size = f"{format_bytes(finding.held_bytes)} {finding.unit}".strip() + " " if finding.held_bytes else ""
    return f"{size}since step {finding.since_step}, held by {finding.holder}. Fix: {finding.fix}"


def _parse_place(finding: Finding) -> tuple[str, int] | None:
    """Return the file and line of the forward pass that allocated a finding's memory; None if unknown."""
    path, _, line = (finding.made_at or "").rpartition(":")
    return (path, int(line)) if path and line.isdigit() else None


def _to_uri(path: str) -> str:
    """Convert a path to the URI that SARIF requires. A relative path becomes a relative URI."""
    place = PurePath(path)
    return place.as_uri() if place.is_absolute() else quote(place.as_posix())


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")
