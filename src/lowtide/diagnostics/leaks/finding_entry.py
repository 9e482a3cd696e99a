"""Entry of the finding log: the memory that one object held at each inspection, and the rule that it breaks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from lowtide._torch.tensors import get_storage_number
from lowtide.diagnostics.leaks.call_site import origin
from lowtide.diagnostics.leaks.holder_history import History, Inspections, grows
from lowtide.diagnostics.leaks.joined_findings import MOST_NAMES
from lowtide.diagnostics.leaks.rules import RULES, Rule
from lowtide.diagnostics.leaks.variable_reads import Reads
from lowtide.report.finding import Finding

if TYPE_CHECKING:
    from torch import UntypedStorage

    from lowtide.diagnostics.leaks.call_log import Backward, Call, SiteStats
    from lowtide.diagnostics.leaks.call_site import Place
    from lowtide.diagnostics.leaks.holders import Holder
    from lowtide.diagnostics.leaks.retained_object import RetainedObject

LEAST_PART = 0.05
"""Share of a container's bytes below which a part of its entries is not named."""


@dataclass(slots=True, kw_only=True)
class HolderWords:
    """Names of an object that holds memory and of its parts, and the advice that uses these names."""

    text: str = ""
    name: str = ""
    owner: str = ""
    container: str = ""
    part: str = ""
    names: tuple[str, ...] = ()
    """All variables that hold the memory. It is freed once all of them are deleted or assigned again."""
    release: str = ""
    """Code that frees the memory by changing all these variables, and breaks no code that reads them later."""
    parts: tuple[str, ...] = ()
    """Entries and attributes that hold the graph. The advice must not be to delete the whole container or object."""
    fix: str = ""
    """Advice of the rule for this holder, a format string."""
    remedy: str = ""

    @classmethod
    def of(cls, main: RetainedObject, group: Sequence[RetainedObject], rule: Rule, history: History) -> HolderWords:
        """Describe the holder of the objects in `group`; `main` is the object to report."""
        n_others = len({item.holder.text for item in group if item.holder is not None}) - 1
        of_gradients = ".grad" if main.subject == "gradients" else ""
        variables = [holder for holder in main.holders if holder.kind == "variable" and holder.name]
        parts = [holder for holder in variables if rule.names_part(holder, history)]
        return cls(
            text=_describe_holder(main) + of_gradients + (f" and {n_others} more like it" if n_others else ""),
            name=_choose_name(main, group),
            owner=main.holder.owner if main.holder else "",
            container=main.holder.container if main.holder else "",
            part=main.holder.part if main.holder else "",
            names=tuple(dict.fromkeys(holder.name for holder in variables if holder not in parts)),
            release=_suggest_release([holder for holder in variables if holder not in parts]),
            parts=tuple(dict.fromkeys(holder.name for holder in parts)),
            fix=rule.choose_fix(main, history),
        )

    def advice(self, fix: str, made_at: Place | None, backward: Backward | None) -> str:
        """Return the advice `fix`, a format string, with the names of this holder and the places filled in."""
        text = fix.format(
            name=self.name or "it",
            owner=self.owner or self.name or "it",
            part=self.part or self.name or "it",
            names=", ".join(self.names) or self.name or "it",
            release=self.release or f"`del {self.name or 'it'}`",
            made=made_at or "that line",
            backward=backward.place if backward else "backward()",
            remedy=self.remedy,
        )
        if self.parts and ("{names}" in self.fix or "{release}" in self.fix):
            text += f"; `.detach()` the tensors in {' and '.join(f'`{part}`' for part in self.parts)}"
        return text


@dataclass(slots=True, kw_only=True)
class Entry:
    """Observations about one object that holds memory, such as a list, and the rule that it breaks."""

    since_step: int
    rule: Rule | None = None
    held_bytes: int = 0
    words: HolderWords = field(default_factory=HolderWords)
    inspections: Inspections = field(default_factory=Inspections)
    made_at: Place | None = None
    backward: Backward | None = None
    stats: SiteStats | None = None
    calls: set[int] = field(default_factory=set)
    """Numbers of the calls that made the graph."""
    pending: list[Call] = field(default_factory=list)
    """Calls that no backward pass has reached yet; the finding is withdrawn once one does."""
    outputs: list[weakref.ref[UntypedStorage]] = field(default_factory=list)
    """Storages that must still be alive after the next forward for the finding to count."""
    has_lasted: bool = False
    is_of_copies: bool = False
    """True if the holder keeps models or optimizers."""
    idle_since: dict[int, int] = field(default_factory=dict)
    """Ids of idle modules -> step of the last inspection; the finding is withdrawn once one of them is called."""
    is_carried: bool = False
    """True if the holder carries tensors without a graph from step to step."""
    is_cycle: bool = False
    """True for an `itertools.cycle`, which keeps its entries for good although they no longer grow in number."""

    def inspect(self, group: Sequence[RetainedObject], largest_graph_bytes: int, step: int) -> History:
        """Record that an inspection in `step` found the objects of `group`. Return the history of all inspections."""
        self.is_of_copies = group[0].subject in ("models", "optimizers")
        self.is_carried = any(item.subject == "carried" or item.is_state for item in group)
        self.idle_since = {number: step for item in group for number in item.idle_ids}
        are_copies = self.rule is not None and self.is_of_copies
        return self.inspections.add(group, step, largest_graph_bytes, are_copies=are_copies)

    def judge(self, main: RetainedObject, history: History) -> Rule | None:
        """Return the rule that the holder of `main` breaks, according to its history; None if it breaks none."""
        self.is_cycle = main.holder is not None and main.holder.is_cycle
        if self.rule and self.is_cycle:
            return self.rule
        if self.rule and self.rule.has_ended(history):
            self.rule = None  # the container is bounded after all, like a cache of masks
        if self.rule and self.rule.claims_graph and main.has_graph:
            return self.rule
        if self.rule and self.is_of_copies and grows(history.held_bytes, 2):
            return self.rule  # the copy that was in use at the last inspection is idle now
        rules = (rule for rule in RULES.values() if main.subject in rule.subjects)
        return next((rule for rule in rules if rule.matches(main, history)), None)

    def note_calls(self, rule: Rule, group: Sequence[RetainedObject]) -> None:
        """Record the calls that created the graphs in `group`, and their backward passes, for a finding of `rule`."""
        calls = sorted((call for item in group for call in item.calls), key=lambda call: call.number)
        self.calls = {call.number for call in calls}
        if calls:
            self.made_at, self.stats = calls[0].place, calls[0].stats
        passes = [backward for item in group for backward in item.backwards]
        by_choice = (backward for backward in passes if backward.retain_graph and not backward.create_graph)
        others = (backward for backward in passes if backward.retain_graph or backward.is_partial)
        self.backward = next(chain(by_choice, others, passes), None)
        if rule.must_last:
            storages = self.inspections.storages
            memory = (reference for call in calls for reference in call.memory)
            self.outputs = [r for r in memory if (held := r()) is not None and get_storage_number(held) in storages]
        unreached = [call for call in calls if call.has_graph and not call.backwards]
        for call in unreached:  # this finding explains the calls without backward, so those are not reported as well
            call.is_explained = True
        self.pending = unreached if rule.is_refuted_by_backward and not passes else []

    def finding(self) -> Finding | None:
        """Make the finding to report; None if the entry breaks no rule, or is not confirmed."""
        rule = self.rule
        if rule is None or any(call.backwards for call in self.pending) or (rule.must_last and not self.has_lasted):
            return None
        if self.stats is not None and (refined := rule.refined(self.stats)) is not rule:
            rule, self.words.fix = refined, refined.fix
        is_unreached = self.stats is not None and not (self.stats.n_reached or self.backward)
        fix = rule.fix_unreached(self.words.fix) if is_unreached else self.words.fix
        return Finding(
            code=rule.code,
            name=rule.name,
            held_bytes=self.held_bytes,
            since_step=self.since_step,
            holder=self.words.text,
            made_at=None if self.made_at is None else str(self.made_at),
            fix=self.words.advice(fix, self.made_at, self.backward),
            unit=rule.unit,
            n_steps=max(1, self.inspections.n),
        )


def _suggest_release(variables: Sequence[Holder]) -> str:
    """Return code that frees the graphs held by `variables`: `del`, or `.detach()` if a variable is read later."""
    names = {reads: list(dict.fromkeys(v.name for v in variables if v.reads is reads)) for reads in Reads}
    phrases = [f"`del {', '.join(names[Reads.NONE])}`"] if names[Reads.NONE] else []
    phrases += [f"`{name} = {name}.detach()`" for name in names[Reads.AFTER_THE_LOOP]]
    if names[Reads.NEXT_STEP]:
        phrases.append(f"store `.detach()`ed tensors in {', '.join(f'`{name}`' for name in names[Reads.NEXT_STEP])}")
    return " and ".join(phrases)


def _describe_holder(item: RetainedObject) -> str:
    """Describe the holder of `item`. If the holder is a variable, describe all variables that hold the same graph."""
    holder = item.holder
    assert holder is not None
    if holder.kind != "variable":
        return holder.text
    variables = [other for other in item.holders if other.kind == "variable"]
    # library frames use other names for the user's object
    own = [v for v in variables if v.place is not None and origin(v.place.file) == "user"] if holder.is_part else []
    return " and ".join(dict.fromkeys(v.text for v in own or variables))


def _choose_name(main: RetainedObject, group: Sequence[RetainedObject]) -> str:
    """Return the name to use in the advice: of the holder, or of the parts of a container's entries that it holds."""
    if main.holder is None:
        return ""
    sizes: Counter[str] = Counter()
    for item in group:
        if item.holder is not None and item.holder.is_part_of_entries:
            sizes[item.holder.name] += item.held_bytes
    names = [name for name, n_bytes in sizes.items() if n_bytes >= LEAST_PART * sizes.total()]
    is_of_parts = main.holder.is_part_of_entries and 1 < len(names) <= MOST_NAMES
    return "`, `".join(sorted(names)) if is_of_parts else main.holder.name
