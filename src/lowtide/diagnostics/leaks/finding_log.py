"""Findings accumulated over the steps: one entry per holder, judged by the rules, reported once certain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lowtide.diagnostics.leaks.call_log import Backward, SiteStats
from lowtide.diagnostics.leaks.call_site import Place
from lowtide.diagnostics.leaks.finding_entry import Entry, HolderWords
from lowtide.diagnostics.leaks.holder_history import GROWTHS, collect_storages, count_held_entries
from lowtide.diagnostics.leaks.joined_findings import join_findings, keep_one_per_line
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules import RULES
from lowtide.report.finding import Finding

LEAST_BYTES = 16 * 1024
"""Smallest number of bytes that a finding must have to be reported at all."""


class FindingLog:
    """Log of findings: one entry for each object that holds memory, updated by inspections and events."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._carried: set[str] = set()
        """Keys of holders whose outputs are passed to the next call, and so must be alive during backward."""

    def add(self, retained: Iterable[RetainedObject], *, least_bytes: int, largest_graph_bytes: int, step: int) -> None:
        """Log the objects that an inspection in `step` found, for each holder that keeps at least `least_bytes`."""
        for key, group in _group_by_holder(retained).items():
            if key in self._carried:  # also if another model is called, or none at the end of the watch
                group = [_mark_as_carried(item) for item in group]
            for subject in ("nodes", "evaluation", "carried", "gradients", "models", "optimizers", "parameters"):
                others = [item for item in group if item.subject == subject]
                if subject == "carried" and others:
                    self._carried.add(key)
                    self.entries.pop(f"LT006 {key}", None)
                # nodes are in host memory, whatever share of the model's memory that is
                if _count_unique_bytes(others) >= (LEAST_BYTES if subject == "nodes" else least_bytes):
                    self._add(f"{subject} {key}", others, largest_graph_bytes, step)
            group = [item for item in group if item.subject == "tensors"]
            graphs = [item for item in group if item.has_graph]
            if _count_unique_bytes(graphs) < least_bytes:
                group = [item for item in group if not item.has_graph]
            if _count_unique_bytes(group) >= least_bytes:
                self._add(self._find_claiming_key(group) or key, group, largest_graph_bytes, step)

    def knows(self, item: RetainedObject) -> bool:
        """Return True if an earlier inspection has found the holder of `item`."""
        key = "" if item.holder is None else item.holder.key
        return key in self.entries or key in self._carried or f"{item.subject} {key}" in self.entries

    def backward_begins(self) -> None:
        """Confirm the findings about outputs that are still alive when a backward pass begins."""
        for entry in self.entries.values():
            entry.has_lasted |= any(output() is not None for output in entry.outputs)
            entry.outputs.clear()

    def retract(self, retained: Iterable[RetainedObject], step: int) -> None:
        """Withdraw findings about containers that have stopped growing.

        `retained` are the objects found by an inspection in `step`. They show the present sizes of the containers.
        """
        growing = [e for e in self.entries.values() if e.rule and e.rule.ends_without_growth and not e.is_cycle]
        for group in _group_by_holder(retained).values() if growing else ():
            storages, n_entries = collect_storages(group), count_held_entries(group)
            for entry in growing:
                known = entry.inspections
                is_the_same = 2 * len(known.storages.keys() & storages.keys()) >= len(known.storages)
                if (
                    is_the_same
                    and not known.is_refilled(group)
                    and known.has_stopped(n_entries, step, are_copies=entry.is_of_copies)
                ):
                    entry.rule = None

    def record(
        self,
        code: str,
        key: str,
        *,
        held_bytes: int,
        step: int,
        text: str,
        name: str = "",
        container: str = "",
        remedy: str = "",
        made_at: Place | None = None,
        backward: Backward | None = None,
    ) -> None:
        """Record a finding of the rule `code` about the holder that `key` identifies in all steps."""
        if code == "LT006" and key in self._carried:
            return
        entry = self.entries.setdefault(f"{code} {key}", Entry(since_step=step))
        entry.rule, entry.made_at, entry.backward = RULES[code], made_at, backward
        entry.words = HolderWords(text=text, name=name, container=container, fix=entry.rule.fix, remedy=remedy)
        entry.held_bytes = max(entry.held_bytes, held_bytes)
        entry.inspections.n += 1

    def findings(self, stats: Iterable[SiteStats], *, least_bytes: int) -> list[Finding]:
        """Return all confirmed findings, largest first.

        They include one for each line in `stats` whose graphs no backward pass reaches, if a graph keeps at least
        `least_bytes` bytes.
        """
        stats = list(stats)
        found: list[tuple[Entry, Finding]] = []
        explained: set[int] = set()
        reasons = {(e.rule.code, e.backward.place) for e in self.entries.values() if e.rule and e.backward}
        gathered = [e.stats for e in self.entries.values() if e.rule and e.rule.gathers and e.stats and e.finding()]
        for key, entry in self.entries.items():
            finding = entry.finding()
            tensors = self.entries.get(key.removeprefix("nodes ").removeprefix("evaluation "), entry)
            if tensors is not entry and tensors.finding() is not None:
                continue  # the same holder keeps these tensors, or graphs that backward has gone through
            if entry.rule is not None and entry.rule.must_last and any(entry.stats is stats for stats in gathered):
                continue  # the container is what holds the output
            if finding is None or entry.rule is None or f"{entry.rule.superseded_by} {key}" in self.entries:
                continue
            place = None if entry.backward is None else entry.backward.place
            if any((code, place) in reasons for code in entry.rule.follows_from):
                continue
            found.append((entry, finding))
            if entry.rule.explains_missing_backward and entry.stats is not None:
                explained.add(id(entry.stats))
        found = [(e, finding) for e, finding in found if not _is_in_use(e, stats)]
        lines: dict[tuple[Place, str], list[SiteStats]] = {}
        for s in stats:
            if id(s) not in explained and s.is_never_reached and s.unreached_bytes >= least_bytes:
                lines.setdefault((s.site.place, s.model), []).append(s)
        findings = keep_one_per_line([*join_findings(found), *map(_make_unreached_finding, lines.values())])
        return sorted(findings, key=lambda finding: (-finding.held_bytes, finding.code))

    def _find_claiming_key(self, group: list[RetainedObject]) -> str | None:
        """Return the key of the entry that already reports the graph of `group`; None if no entry does.

        A second holder of the same graph is not reported.
        """
        calls = {call.number for s in group if s.has_graph and not s.is_input for call in s.calls}
        claims = (key for key, e in self.entries.items() if e.rule and e.rule.claims_graph and e.calls & calls)
        return next(claims, None)

    def _add(self, key: str, group: list[RetainedObject], largest_graph_bytes: int, step: int) -> None:
        main = max(group, key=lambda s: (s.has_graph, s.held_bytes, bool(s.calls)))
        made_in_step = min(s.made_in_step for s in group)
        entry = self.entries.setdefault(key, Entry(since_step=made_in_step))
        history = entry.inspect(group, largest_graph_bytes, step)
        if entry.rule and entry.rule.ends_without_change and entry.inspections.n_unchanged >= GROWTHS - 1:
            entry.rule = None
            return
        rule = entry.judge(main, history)
        if rule is None:
            return
        entry.rule = rule
        entry.since_step = min(entry.since_step, made_in_step)
        entry.held_bytes = max(entry.held_bytes, rule.count_reported_bytes(history))
        if rule.names_holder(main):
            entry.words = HolderWords.of(main, group, rule, history)
            if main.holder is not None and main.holder.stored_in is not None and not main.calls:
                entry.made_at = main.holder.stored_in.find_value_place()
        entry.note_calls(rule, group)


def _mark_as_carried(item: RetainedObject) -> RetainedObject:
    if item.subject != "tensors" or item.has_graph:
        return item
    return replace(item, subject="carried", is_input=True, is_output=False)


def _is_in_use(entry: Entry, stats: Iterable[SiteStats]) -> bool:
    """Return True if a model that the entry reports as idle has been called since, as in loops that use several."""
    last = {number: step for s in stats for number, step in s.module_ids.items() if number in entry.idle_since}
    return any(step > entry.idle_since[number] for number, step in last.items())


def _count_unique_bytes(retained: Iterable[RetainedObject]) -> int:
    """Return the bytes of all storages that the objects hold, counting each storage once."""
    return sum(collect_storages(retained).values())


def _group_by_holder(retained: Iterable[RetainedObject]) -> dict[str, list[RetainedObject]]:
    groups: dict[str, list[RetainedObject]] = {}
    for item in retained:
        if item.holder is not None:
            groups.setdefault(item.holder.key, []).append(item)
    return groups


def _make_unreached_finding(stats: list[SiteStats]) -> Finding:
    """Make the finding for a line of code whose graphs were all freed without backward, from the counts `stats`."""
    rule = RULES["LT002"]
    place, model, n_times = stats[0].site.place, stats[0].model, sum(s.n_unreached for s in stats)
    return Finding(
        code=rule.code,
        name=rule.name,
        held_bytes=max(s.unreached_bytes for s in stats),
        since_step=min(s.first_unreached_step for s in stats),
        holder=f"nothing after the forward of {model}: its graph was made {n_times} times and never used",
        made_at=str(place),
        fix=rule.fix.format(made=place),
        n_steps=n_times,
    )
