"""What inspections found, put together over the steps: one entry a holder, judged by the rules, told when sure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lowtide.diagnostics.leaks.call_log import Backward, Call, Stats
from lowtide.diagnostics.leaks.call_site import Place
from lowtide.diagnostics.leaks.finding import Finding, Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor
from lowtide.diagnostics.leaks.rules import SURVIVAL
from lowtide.diagnostics.leaks.rules.carried_state import CARRIED_STATE
from lowtide.diagnostics.leaks.rules.growing_containers import GROWING_LIST
from lowtide.diagnostics.leaks.rules.long_lived_outputs import ALIVE_AT_NEXT_FORWARD, ALIVE_DURING_BACKWARD
from lowtide.diagnostics.leaks.rules.unreached_graphs import BACKWARD_SKIPPED, NO_GRAD_MISSING

_NOT_BY_BACKWARD = ("LT001", "LT008", "LT009", "LT013", "LT014", "LT020")
"""Rules whose finding is withdrawn if a backward pass comes to the graph after all."""


@dataclass(slots=True)
class Entry:
    """What is known of one holder."""

    rule: Rule | None = None
    held_bytes: int = 0
    since_step: int = 0
    text: str = ""
    name: str = ""
    names: tuple[str, ...] = ()
    """All variables that hold it, where several do: all have to let go."""
    made: Place | None = None
    backward: Backward | None = None
    stats: Stats | None = None
    calls: set[int] = field(default_factory=set)
    """Numbers of the calls that made its graph."""
    pending: list[Call] = field(default_factory=list)
    """Calls that no backward pass had come to; if one does later, there is nothing to find."""
    n_inspections: int = 0
    sizes: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    storages: frozenset[int] = frozenset()

    def finding(self) -> Finding | None:
        """What to say of it; None if it turned out to be nothing."""
        rule = self.rule
        if rule is None or any(call.backwards for call in self.pending):
            return None
        if rule is BACKWARD_SKIPPED and self.stats is not None and not self.stats.n_reached:
            rule = NO_GRAD_MISSING
        fix = rule.fix.format(
            name=self.name or "it",
            names=", ".join(self.names) or self.name or "it",
            made=self.made or "that line",
            backward=self.backward.place if self.backward else "backward()",
        )
        return Finding(
            code=rule.code,
            name=rule.name,
            held_bytes=self.held_bytes,
            since_step=self.since_step,
            holder=self.text,
            made_at=None if self.made is None else str(self.made),
            fix=fix,
            n_steps=max(1, self.n_inspections),
        )


class Ledger:
    """The entries by holder, and what events told."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def add(self, survivors: Iterable[Survivor], *, least_bytes: int, largest_graph_bytes: int) -> None:
        """Take in what one inspection found, as far as a holder has at least `least_bytes` of it."""
        for key, group in _by_holder(survivors).items():
            graphs = [survivor for survivor in group if survivor.has_graph]
            if _bytes_of(graphs) < least_bytes:
                group = [survivor for survivor in group if not survivor.has_graph]
            if _bytes_of(group) >= least_bytes:
                self._add(self._carrier(group) or key, group, largest_graph_bytes)

    def take_back(self, survivors: Iterable[Survivor]) -> None:
        """A step later: what has as many entries as before has stopped growing, whoever is said to hold it now."""
        growing = [entry for entry in self.entries.values() if entry.rule is GROWING_LIST]
        for group in _by_holder(survivors).values() if growing else ():
            storages, n_entries = _storages_of(group), _entries_of(group)
            for entry in growing:
                is_the_same = 2 * len(entry.storages & storages) >= len(entry.storages)
                if is_the_same and n_entries <= entry.entries[-1]:
                    entry.rule = None

    def say(
        self,
        rule: Rule,
        key: str,
        *,
        held_bytes: int,
        step: int,
        text: str,
        name: str = "",
        made: Place | None = None,
        backward: Backward | None = None,
    ) -> None:
        """Take in what an event told."""
        entry = self.entries.setdefault(f"{rule.code} {key}", Entry(since_step=step))
        entry.rule, entry.text, entry.name, entry.made, entry.backward = rule, text, name, made, backward
        entry.held_bytes = max(entry.held_bytes, held_bytes)
        entry.n_inspections += 1

    def findings(self, stats: Iterable[Stats], *, least_bytes: int) -> list[Finding]:
        """All that is sure, the largest first; of graphs that nobody needed those that are not smaller."""
        found: list[Finding] = []
        told: set[int] = set()
        for key, entry in self.entries.items():
            finding = entry.finding()
            if finding is None or self._is_said_better(key, entry):
                continue
            found.append(finding)
            if entry.rule is BACKWARD_SKIPPED and entry.stats is not None:
                told.add(id(entry.stats))
        lines: dict[tuple[Place, str], list[Stats]] = {}
        for s in stats:
            if id(s) not in told and _is_never_needed(s, least_bytes):
                lines.setdefault((s.site.place, s.model), []).append(s)
        found += map(_never_needed, lines.values())
        return sorted(found, key=lambda finding: (-finding.held_bytes, finding.code))

    def _carrier(self, group: list[Survivor]) -> str | None:
        """The state that carries this graph, if that is known: whatever else is made from it holds its graph too."""
        calls = {call.number for s in group if s.has_graph and not s.is_input for call in s.calls}
        carriers = (key for key, entry in self.entries.items() if entry.rule is CARRIED_STATE and entry.calls & calls)
        return next(carriers, None)

    def _is_said_better(self, key: str, entry: Entry) -> bool:
        during = self.entries.get(f"{ALIVE_DURING_BACKWARD.code} {key}")
        return entry.rule is ALIVE_AT_NEXT_FORWARD and during is not None

    def _add(self, key: str, group: list[Survivor], largest_graph_bytes: int) -> None:
        entry = self.entries.get(key)
        main = max(group, key=lambda s: (s.has_graph, s.held_bytes))
        held_bytes, storages = _bytes_of(group), _storages_of(group)
        born = min(s.born for s in group)
        if entry is None:
            entry = self.entries[key] = Entry(since_step=born)
        holders = [s.holder for s in group if s.holder is not None]
        entry.sizes = [*entry.sizes[-8:], held_bytes]
        entry.entries = [*entry.entries[-8:], _entries_of(group)]
        made_by = Counter(id(s.calls[0].stats) for s in group if s.has_graph and s.calls)
        past = Past(
            has_changed=entry.n_inspections > 0 and not storages <= entry.storages,
            held_bytes=entry.sizes,
            entries=entry.entries,
            n_alike=max(made_by.values(), default=0),
            largest_graph_bytes=largest_graph_bytes,
        )
        entry.n_inspections += 1
        entry.storages = storages
        rule = next((rule for rule in SURVIVAL if rule.matches is not None and rule.matches(main, past)), None)
        if entry.rule is CARRIED_STATE and main.has_graph:
            rule = CARRIED_STATE
        if entry.rule is GROWING_LIST and entry.entries[-1] <= entry.entries[-2]:
            entry.rule = None  # it has an end after all, as a cache of masks has
        if rule is None:
            return
        holder = main.holder
        entry.rule = rule
        entry.since_step = min(entry.since_step, born)
        entry.held_bytes = max(entry.held_bytes, held_bytes)
        if rule is not CARRIED_STATE or main.is_input:
            n_others = len({holder.text for holder in holders}) - 1
            entry.text = _text(main) + (f" and {n_others} more like it" if n_others else "")
            entry.name = holder.name if holder else ""
            entry.names = tuple(dict.fromkeys(h.name for h in main.holders if h.kind == "variable" and h.name))
        calls = sorted((call for s in group for call in s.calls), key=lambda call: call.number)
        entry.calls = {call.number for call in calls}
        if calls:
            entry.made = calls[0].place
            entry.stats = calls[0].stats
        passes = [b for s in group for b in s.backwards]
        entry.backward = next((b for b in passes if b.retain_graph or b.is_partial), passes[0] if passes else None)
        # Of a call that a finding explains nobody needs to be told that it has no backward.
        unreached = [call for call in calls if call.has_graph and not call.backwards]
        for call in unreached:
            call.is_explained = True
        entry.pending = unreached if rule.code in _NOT_BY_BACKWARD and not passes else []


def _bytes_of(survivors: Iterable[Survivor]) -> int:
    """What they hold together; they may share memory."""
    return sum({number: n for s in survivors for number, n in s.storages.items()}.values())


def _storages_of(survivors: Iterable[Survivor]) -> frozenset[int]:
    return frozenset(number for s in survivors for number in s.storages)


def _entries_of(survivors: Iterable[Survivor]) -> int:
    return max(s.holder.entries or 0 for s in survivors if s.holder is not None)


def _by_holder(survivors: Iterable[Survivor]) -> dict[str, list[Survivor]]:
    groups: dict[str, list[Survivor]] = {}
    for survivor in survivors:
        holder = survivor.holder
        if holder is not None:
            groups.setdefault(holder.key, []).append(survivor)
    return groups


def _text(survivor: Survivor) -> str:
    """The holder; where several variables hold the same graph, all of them."""
    holder = survivor.holder
    assert holder is not None
    if holder.kind != "variable":
        return holder.text
    return " and ".join(dict.fromkeys(h.text for h in survivor.holders if h.kind == "variable"))


def _is_never_needed(stats: Stats, least_bytes: int) -> bool:
    """Whether graphs are made there and no backward pass ever comes to one; where one does, others may be dropped."""
    is_unneeded = stats.n_unreached and not stats.n_reached and not stats.n_explained
    return bool(is_unneeded) and stats.unreached_bytes >= least_bytes


def _never_needed(stats: list[Stats]) -> Finding:
    """Of a line's calls whose graphs were dropped without a backward pass, all of them, and that no inspection met."""
    rule = NO_GRAD_MISSING
    place, model, n_times = stats[0].site.place, stats[0].model, sum(s.n_unreached for s in stats)
    return Finding(
        code=rule.code,
        name=rule.name,
        held_bytes=max(s.unreached_bytes for s in stats),
        since_step=min(s.first_unreached_step for s in stats),
        holder=f"nobody after the forward of {model}: its graph was made for nothing, {n_times} times",
        made_at=str(place),
        fix=rule.fix.format(name="its output", names="its output", made=place, backward="backward()"),
        n_steps=n_times,
    )
