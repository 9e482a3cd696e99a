"""Several findings about one mistake, joined into a single finding."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from lowtide.report.finding import Finding

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.finding_entry import Entry

_GATHERING = ("LT008", "LT010", "LT021", "LT029", "LT030")
"""Codes of findings about containers, in order of precedence: a container of graphs is reported as LT008."""

_LEFT_OUT = ("LT006", "LT023")
"""Codes of findings that are left out if their container has a finding of `_GATHERING`."""

MOST_NAMES = 3
"""Largest number of parts of an entry that the advice names."""


def join_findings(findings: Iterable[tuple[Entry, Finding]]) -> list[Finding]:
    """Join findings about the same mistake, and return all findings that remain.

    Findings are joined if they are about parts of the same container's entries, or about graphs that one call created
    and one backward pass retains. A finding about a growing container replaces findings about single outputs of the
    same line, and about graphs without saved tensors in the same container.
    """
    findings = list(findings)
    gathering = {entry.words.container for entry, finding in findings if finding.code in _GATHERING} - {""}
    gathered_at = {
        finding.made_at for _, finding in findings if finding.code in _GATHERING
    }  # outputs of these lines stay alive in a container, whatever variable is deleted
    findings = [(e, f) for e, f in findings if f.code not in _LEFT_OUT or e.words.container not in gathering]
    findings = [(e, f) for e, f in findings if f.code != "LT006" or f.made_at not in gathered_at]
    groups: dict[object, list[tuple[Entry, Finding]]] = {}
    for number, (entry, finding) in enumerate(findings):
        key: object = number
        if finding.code == "LT021" and entry.is_carried:
            key = finding.code, finding.made_at
        elif finding.code == "LT014":
            key = finding.code, finding.holder.rpartition(".")[0], finding.made_at
        elif finding.code in _GATHERING and entry.words.container:
            key = entry.words.container
        elif finding.code == "LT003" and entry.backward is not None:
            key = entry.backward.place, finding.made_at
        groups.setdefault(key, []).append((entry, finding))
    return [_join(group) if len(group) > 1 else group[0][1] for group in groups.values()]


def _join(group: list[tuple[Entry, Finding]]) -> Finding:
    is_of_graphs = any(finding.code == "LT008" for _, finding in group)
    group.sort(key=lambda one: ((one[1].code == "LT008") != is_of_graphs, -one[1].held_bytes, one[0].words.name))
    entry, first = group[0]
    if first.code == "LT003":
        return first
    storages = {number: n for other, _ in group for number, n in other.inspections.storages.items()}
    names = list(dict.fromkeys(other.words.name for other, _ in group))
    shown = names if len(names) <= MOST_NAMES else names[:1]
    is_of_variables = entry.is_carried or first.code == "LT014"
    n_more = f"{len(group) - 1} more"
    others = " and ".join(f"'{name}'" for name in shown[1:]) or n_more
    return replace(
        first,
        holder=f"{first.holder} and {others if is_of_variables else f'{n_more} of each entry'}",
        held_bytes=max(first.held_bytes, sum(storages.values())),
        since_step=min(finding.since_step for _, finding in group),
        fix=re.sub(
            f"`(self\\.)?{re.escape(entry.words.name)}`",
            lambda at: ", ".join(f"`{at[1] or ''}{n}`" for n in shown),
            first.fix,
        ),
    )


def keep_one_per_line(findings: list[Finding]) -> list[Finding]:
    """Keep only the largest finding LT002 (a forward needs no graph) of each line.

    LT008 (a container of graphs) and LT006 (an output alive in backward) are left out for the same line. All findings
    about other lines are kept.
    """
    largest: dict[str | None, Finding] = {}
    for finding in findings:
        if finding.code == "LT002":
            known = largest.setdefault(finding.made_at, finding)
            largest[finding.made_at] = max(known, finding, key=lambda f: f.held_bytes)
    gathered = {"LT002", "LT006", "LT008"}
    return [f for f in findings if f.code not in gathered or largest.get(f.made_at, f) is f]
