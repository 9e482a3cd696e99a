"""Findings accumulated over the steps: one entry per holder, judged by the rules, reported once certain."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from lowtide._torch.tensors import storage_number
from lowtide.diagnostics.leaks.call_log import Backward, Call, SiteStats
from lowtide.diagnostics.leaks.call_site import Place
from lowtide.diagnostics.leaks.holder_history import GROWTHS, History, has_slowed
from lowtide.diagnostics.leaks.inspection import RetainedObject
from lowtide.diagnostics.leaks.joined_findings import MOST_NAMES, joined, one_of_line
from lowtide.diagnostics.leaks.reference_path import merged
from lowtide.diagnostics.leaks.rules import RULES, Rule
from lowtide.report.finding import Finding

if TYPE_CHECKING:
    from torch import UntypedStorage

LEAST_PART = 0.05
"""Share of a container's bytes below which a part of its entries is not named."""

LEAST_PARTS = 3
"""Smallest number of parts that counts as entries: a pair of tensors gathers nothing."""

_HISTORY = 8
"""Number of earlier inspections of a holder that rules can look back on."""


@dataclass(slots=True)
class Entry:
    """Observations about one holder."""

    rule: Rule | None = None
    held_bytes: int = 0
    since_step: int = 0
    text: str = ""
    name: str = ""
    owner: str = ""
    container: str = ""
    part: str = ""
    names: tuple[str, ...] = ()
    """All variables that hold the memory: it is freed once none of them does."""
    parts: tuple[str, ...] = ()
    """Containers and objects that hold the graph by one of their parts; the advice must not be to delete them whole."""
    fix: str = ""
    """Advice of the rule for this holder, a format string."""
    remedy: str = ""
    made_at: Place | None = None
    backward: Backward | None = None
    stats: SiteStats | None = None
    calls: set[int] = field(default_factory=set)
    """Numbers of the calls that made the graph."""
    pending: list[Call] = field(default_factory=list)
    """Calls that no backward pass has reached yet; the finding is void once one does."""
    n_inspections: int = 0
    sizes: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    inspected: list[int] = field(default_factory=list)
    """Steps of those inspections."""
    grown_at: int = 0
    """Step of the last inspection that found more entries than the one before."""
    storages: dict[int, int] = field(default_factory=dict)
    """Bytes by storage, at the last inspection."""
    n_unchanged: int = 0
    """Number of inspections in a row that found the same storages as the one before."""
    outputs: list[weakref.ref[UntypedStorage]] = field(default_factory=list)
    """Memory that has to outlive the next forward for the finding to count."""
    has_lasted: bool = False
    is_of_copies: bool = False
    """True if the holder keeps models or optimizers."""
    idle_since: dict[int, int] = field(default_factory=dict)
    """Ids of modules that were not in use -> steps of the last inspection; the finding is void if one is called later.
    """
    is_carried: bool = False
    """True if the holder carries tensors without a graph from step to step."""
    is_cycle: bool = False
    """True if the holder keeps its entries for good once they no longer grow."""

    def has_stopped(self, n_entries: int, step: int) -> bool:
        """Return True if containers that now have `n_entries` entries no longer grow.

        Copies of models and optimizers are added once an epoch: they count as complete after twice as many steps.
        """
        if step == self.inspected[-1]:
            return False  # too early to tell: a loader may have added its entry before the step began
        if self.rule is not None and self.is_of_copies:
            return step > 2 * self.grown_at
        return n_entries <= self.entries[-1] or has_slowed([*self.entries, n_entries], [*self.inspected, step])

    def finding(self) -> Finding | None:
        """Return the finding to report; None if it is no longer valid."""
        rule = self.rule
        if rule is None or any(call.backwards for call in self.pending) or (rule.must_last and not self.has_lasted):
            return None
        if self.stats is not None and (refined := rule.refined(self.stats)) is not rule:
            rule, self.fix = refined, refined.fix
        is_unreached = self.stats is not None and not (self.stats.n_reached or self.backward)
        fix = (rule.fix_unreached(self.fix) if is_unreached else self.fix).format(
            name=self.name or "it",
            owner=self.owner or self.name or "it",
            part=self.part or self.name or "it",
            names=", ".join(self.names) or self.name or "it",
            made=self.made_at or "that line",
            backward=self.backward.place if self.backward else "backward()",
            remedy=self.remedy,
        )
        if self.parts and "{names}" in self.fix:
            fix += f"; `.detach()` the tensors in {' and '.join(f'`{part}`' for part in self.parts)}"
        return Finding(
            code=rule.code,
            name=rule.name,
            held_bytes=self.held_bytes,
            since_step=self.since_step,
            holder=self.text,
            made_at=None if self.made_at is None else str(self.made_at),
            fix=fix,
            unit=rule.unit,
            n_steps=max(1, self.n_inspections),
        )


class FindingLog:
    """Entries by holder, from inspections and from events."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._carried: set[str] = set()
        """Keys of holders whose outputs the next call is given: they have to be alive during backward."""

    def add(self, retained: Iterable[RetainedObject], *, least_bytes: int, largest_graph_bytes: int, step: int) -> None:
        """Add the objects that one inspection, in step `step`, found, if their holder holds at least `least_bytes`."""
        for key, group in _by_holder(retained).items():
            if key in self._carried:  # also where another model is called, or none, as at the end of the watch
                group = [_as_carried(item) for item in group]
            for subject in ("nodes", "evaluation", "carried", "gradients", "models", "optimizers", "parameters"):
                others = [item for item in group if item.subject == subject]
                if subject == "carried" and others:
                    self._carried.add(key)
                    self.entries.pop(f"LT006 {key}", None)
                if _unique_bytes(others) >= least_bytes:
                    self._add(f"{subject} {key}", others, largest_graph_bytes, step)
            group = [item for item in group if item.subject == "tensors"]
            graphs = [item for item in group if item.has_graph]
            if _unique_bytes(graphs) < least_bytes:
                group = [item for item in group if not item.has_graph]
            if _unique_bytes(group) >= least_bytes:
                self._add(self._claimant(group) or key, group, largest_graph_bytes, step)

    def knows(self, item: RetainedObject) -> bool:
        """Return True if an earlier inspection met the holder of `item`."""
        key = "" if item.holder is None else item.holder.key
        return key in self.entries or key in self._carried or f"{item.subject} {key}" in self.entries

    def backward_begins(self) -> None:
        """Confirm findings about outputs that have outlived the forward."""
        for entry in self.entries.values():
            entry.has_lasted |= any(output() is not None for output in entry.outputs)
            entry.outputs.clear()

    def retract(self, retained: Iterable[RetainedObject], step: int) -> None:
        """Withdraw findings of growth for containers that no longer grow at `step`."""
        growing = [e for e in self.entries.values() if e.rule and e.rule.ends_without_growth and not e.is_cycle]
        for group in _by_holder(retained).values() if growing else ():
            storages, n_entries = _storages(group), _n_entries(group)
            for entry in growing:
                is_the_same = 2 * len(entry.storages.keys() & storages.keys()) >= len(entry.storages)
                if is_the_same and entry.has_stopped(n_entries, step):
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
        """Record the finding of an event under rule `code`; `key` identifies the holder from step to step."""
        if code == "LT006" and key in self._carried:
            return
        entry = self.entries.setdefault(f"{code} {key}", Entry(since_step=step))
        entry.rule, entry.text, entry.name, entry.made_at, entry.backward = RULES[code], text, name, made_at, backward
        entry.fix, entry.remedy, entry.container = RULES[code].fix, remedy, container
        entry.held_bytes = max(entry.held_bytes, held_bytes)
        entry.n_inspections += 1

    def findings(self, stats: Iterable[SiteStats], *, least_bytes: int) -> list[Finding]:
        """Return all certain findings, the largest first. Forwards without backward are included from `least_bytes`
        on.
        """
        stats = list(stats)
        found: list[tuple[Entry, Finding]] = []
        explained: set[int] = set()
        reasons = {(e.rule.code, e.backward.place) for e in self.entries.values() if e.rule and e.backward}
        gathered = [e.stats for e in self.entries.values() if e.rule and e.rule.gathers and e.stats and e.finding()]
        for key, entry in self.entries.items():
            finding = entry.finding()
            tensors = self.entries.get(key.removeprefix("nodes "), entry)
            if tensors is not entry and tensors.finding() is not None:
                continue  # the graphs are empty because backward has gone through what the same holder keeps
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
        findings = one_of_line([*joined(found), *map(_never_reached, lines.values())])
        return sorted(findings, key=lambda finding: (-finding.held_bytes, finding.code))

    def _claimant(self, group: list[RetainedObject]) -> str | None:
        """Return the key of the entry that is reported for the graph of `group`; other holders only refer to that
        graph.
        """
        calls = {call.number for s in group if s.has_graph and not s.is_input for call in s.calls}
        claims = (key for key, e in self.entries.items() if e.rule and e.rule.claims_graph and e.calls & calls)
        return next(claims, None)

    def _add(self, key: str, group: list[RetainedObject], largest_graph_bytes: int, step: int) -> None:
        main = max(group, key=lambda s: (s.has_graph, s.held_bytes, bool(s.calls)))
        born = min(s.born for s in group)
        entry = self.entries.setdefault(key, Entry(since_step=born))
        history = self._history(entry, group, largest_graph_bytes, step)
        if entry.rule and entry.rule.ends_without_change and entry.n_unchanged >= GROWTHS - 1:
            entry.rule = None
            return
        rule = self._judge(entry, main, history)
        if rule is None:
            return
        entry.rule = rule
        entry.since_step = min(entry.since_step, born)
        entry.held_bytes = max(entry.held_bytes, rule.reported_bytes(history))
        if rule.names_holder(main):
            entry.fix = rule.fix_for(main, history)
            n_others = len({item.holder.text for item in group if item.holder is not None}) - 1
            of_gradients = ".grad" if main.subject == "gradients" else ""
            entry.text = _text(main) + of_gradients + (f" and {n_others} more like it" if n_others else "")
            entry.name = _name(main, group)
            entry.owner = main.holder.owner if main.holder else ""
            entry.container = main.holder.container if main.holder else ""
            entry.part = main.holder.part if main.holder else ""
            variables = [h for h in main.holders if h.kind == "variable" and h.name]
            parts = [h for h in variables if rule.names_part(h, history)]
            entry.names = tuple(dict.fromkeys(h.name for h in variables if h not in parts))
            entry.parts = tuple(dict.fromkeys(h.name for h in parts))
            if main.holder is not None and main.holder.stored_in is not None and not main.calls:
                entry.made_at = main.holder.stored_in.place_of_value()
        self._note_calls(entry, rule, group)

    def _history(self, entry: Entry, group: list[RetainedObject], largest_graph_bytes: int, step: int) -> History:
        """Record in `entry` the bytes, entries and storages of this inspection; return them with the earlier ones."""
        storages, n_entries = _storages(group), _n_entries(group)
        entry.is_of_copies = group[0].subject in ("models", "optimizers")
        entry.is_carried = any(item.subject == "carried" or item.is_state for item in group)
        entry.idle_since = {number: step for item in group for number in item.idle_ids}
        has_stopped = bool(entry.entries) and entry.has_stopped(n_entries, step)
        if not entry.entries or n_entries > entry.entries[-1]:
            entry.grown_at = step
        entry.inspected = [*entry.inspected[-_HISTORY:], step]
        entry.sizes = [*entry.sizes[-_HISTORY:], _unique_bytes(group)]
        entry.entries = [*entry.entries[-_HISTORY:], n_entries]
        n_of_site = Counter(id(s.calls[0].stats) for s in group if s.has_graph and s.calls)
        history = History(
            has_changed=entry.n_inspections > 0 and not storages.keys() <= entry.storages.keys(),
            held_bytes=entry.sizes,
            entries=entry.entries,
            has_stopped=has_stopped,
            n_steps=len({step for item in group for step in item.steps or (item.born,)}),
            n_alike=max(n_of_site.values(), default=0),
            largest_graph_bytes=largest_graph_bytes,
        )
        entry.n_inspections += 1
        entry.n_unchanged = entry.n_unchanged + 1 if storages.keys() == entry.storages.keys() else 0
        entry.storages = storages
        return history

    def _judge(self, entry: Entry, main: RetainedObject, history: History) -> Rule | None:
        """Return the rule that `main` falls under, if any."""
        entry.is_cycle = main.holder is not None and main.holder.is_cycle
        if entry.rule and entry.is_cycle:
            return entry.rule
        if entry.rule and entry.rule.ends_without_growth and history.has_stopped:
            entry.rule = None  # the container is bounded after all, as a cache of masks is
        if entry.rule and entry.rule.claims_graph and main.has_graph:
            return entry.rule
        rules = (rule for rule in RULES.values() if main.subject in rule.subjects)
        return next((rule for rule in rules if rule.matches(main, history)), None)

    def _note_calls(self, entry: Entry, rule: Rule, group: list[RetainedObject]) -> None:
        calls = sorted((call for s in group for call in s.calls), key=lambda call: call.number)
        entry.calls = {call.number for call in calls}
        if calls:
            entry.made_at, entry.stats = calls[0].place, calls[0].stats
        passes = [b for s in group for b in s.backwards]
        by_choice = (b for b in passes if b.retain_graph and not b.create_graph)
        others = (b for b in passes if b.retain_graph or b.is_partial)
        entry.backward = next(chain(by_choice, others, passes), None)
        if rule.must_last:
            memory = (reference for call in calls for reference in call.memory)
            entry.outputs = [r for r in memory if (held := r()) is not None and storage_number(held) in entry.storages]
        unreached = [call for call in calls if call.has_graph and not call.backwards]
        for call in unreached:  # this finding explains the calls without backward, so those are not reported as well
            call.is_explained = True
        entry.pending = unreached if rule.is_refuted_by_backward and not passes else []


def _as_carried(item: RetainedObject) -> RetainedObject:
    if item.subject != "tensors" or item.has_graph:
        return item
    return replace(item, subject="carried", is_input=True, is_output=False)


def _is_in_use(entry: Entry, stats: Iterable[SiteStats]) -> bool:
    """Return True if a model of the entry was called after the inspection that found it idle: models take turns."""
    last = {number: step for s in stats for number, step in s.module_ids.items() if number in entry.idle_since}
    return any(step > entry.idle_since[number] for number, step in last.items())


def _unique_bytes(retained: Iterable[RetainedObject]) -> int:
    """Return the bytes of all storages, each counted once."""
    return sum(_storages(retained).values())


def _storages(retained: Iterable[RetainedObject]) -> dict[int, int]:
    return {number: n_bytes for s in retained for number, n_bytes in s.storages.items()}


def _n_entries(retained: Iterable[RetainedObject]) -> int:
    """Return the total number of entries of all containers through which the holder reaches the tensors.

    Without containers, the number of parts of a tuple, or of attributes whose names differ in numbers, from three on.
    """
    containers: dict[int, int] = {}
    parts: set[str] = set()
    for item in retained:
        if item.holder is not None:
            containers = merged(containers, item.holder.containers)
            parts.add(item.holder.text)
    return sum(containers.values()) or (len(parts) if len(parts) >= LEAST_PARTS else 0)


def _by_holder(retained: Iterable[RetainedObject]) -> dict[str, list[RetainedObject]]:
    groups: dict[str, list[RetainedObject]] = {}
    for item in retained:
        if item.holder is not None:
            groups.setdefault(item.holder.key, []).append(item)
    return groups


def _text(item: RetainedObject) -> str:
    """Return the description of the holder, or of all variables if several hold the same graph."""
    holder = item.holder
    assert holder is not None
    if holder.kind != "variable":
        return holder.text
    return " and ".join(dict.fromkeys(h.text for h in item.holders if h.kind == "variable"))


def _name(main: RetainedObject, group: list[RetainedObject]) -> str:
    """Return the name of the holder for the advice, or the names of all parts of the same container's entries."""
    if main.holder is None:
        return ""
    sizes: Counter[str] = Counter()
    for item in group:
        if item.holder is not None and item.holder.is_part_of_entries:
            sizes[item.holder.name] += item.held_bytes
    names = [name for name, n_bytes in sizes.items() if n_bytes >= LEAST_PART * sizes.total()]
    is_of_parts = main.holder.is_part_of_entries and 1 < len(names) <= MOST_NAMES
    return "`, `".join(sorted(names)) if is_of_parts else main.holder.name


def _never_reached(stats: list[SiteStats]) -> Finding:
    """Return the finding for a line whose graphs were all dropped without backward, each of them between two
    inspections.
    """
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
