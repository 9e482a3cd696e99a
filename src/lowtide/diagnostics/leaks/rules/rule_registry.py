"""Registry of the rules of `lowtide.watch`: `@rule(code, ...)` registers a subclass of `Rule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.call_log import SiteStats
    from lowtide.diagnostics.leaks.holder_history import History
    from lowtide.diagnostics.leaks.holders import Holder
    from lowtide.diagnostics.leaks.retained_object import RetainedObject


class Rule:
    """Base class of the rules of `lowtide.watch`, one subclass per kind of finding.

    `Entry.judge` calls `matches` of each rule with an object that a step has left alive.
    """

    code: str
    priority: int | None
    """Rank in the order in which rules are tried on a retained object; the first match counts. None for a rule whose
    findings come from events only.
    """
    name: str
    what: str
    why: str
    bad: str
    good: str
    fix: str
    """One line of advice; may contain {name} (the variable or attribute), {owner} (the object whose attribute it is),
    {part} (the entry or attribute itself), {names} (all variables), {release} (code that frees their memory), {remedy}
    (words of the event), {made} and {backward} (places in the code).
    """

    is_refuted_by_backward = False
    """True if the finding is withdrawn when a later backward pass goes through the graph."""
    explains_missing_backward = False
    """True if the finding explains why no backward pass reached the calls of its line."""
    claims_graph = False
    """True if a graph is reported only for the holder that was found first, although others may hold it later."""
    subjects: tuple[str, ...] = ("tensors",)
    """Retained objects that the rule judges (`RetainedObject.subject`)."""
    ends_without_growth = False
    """True if the finding is withdrawn when its container stops growing."""
    ends_without_change = False
    """True if the finding is withdrawn when the same memory, computed once for all, is held through several steps."""
    fix_of_container = ""
    """Advice if a container collects the tensors, so that its name must not be deleted or set to None."""
    fix_of_part = ""
    """Advice if an entry or attribute of the variable holds the tensors."""
    gathers = False
    """True for containers that collect outputs. Single outputs of the same line are then not reported."""
    unit = ""
    """Words printed after the bytes, such as "of host memory a step"."""
    must_last = False
    """True if the finding counts only if the outputs are still alive when a backward pass of the next step begins."""
    superseded_by = ""
    """Code of a rule whose finding on the same holder replaces this one."""
    follows_from: tuple[str, ...] = ()
    """Codes of other rules. If one of them has a finding about the same backward pass, this one is left out."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        """Return True if `item` breaks this rule, judged by the history of its holder."""
        return False

    def names_holder(self, item: RetainedObject) -> bool:
        """Return True if the finding should name the holder of `item` and give advice about it."""
        return True

    def names_part(self, holder: Holder, history: History) -> bool:
        """Return True if the advice is about an entry or attribute of `holder`, not about the whole variable."""
        return holder.is_part and bool(self.fix_of_part)

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`, a format string such as `fix`."""
        holder = item.holder
        if holder is not None and self.names_part(holder, history):
            return self.fix_of_part
        if holder is not None and holder.gathers and self.fix_of_container:
            return self.fix_of_container
        return self.fix

    def has_ended(self, history: History) -> bool:
        """Return True if a finding of this rule must be withdrawn, because its container no longer grows."""
        return self.ends_without_growth and history.has_stopped

    def count_reported_bytes(self, history: History) -> int:
        """Return the bytes that a finding of this rule states: by default, the bytes held at the last inspection."""
        return history.held_bytes[-1]

    def fix_unreached(self, fix: str) -> str:
        """Return the advice that replaces `fix` if no backward pass reaches any graph created by the line."""
        return fix

    def refined(self, stats: SiteStats) -> Rule:
        """Return the rule to report instead of this one, according to counts of the line's calls; by default itself."""
        return self


RULES: dict[str, Rule] = {}
"""All rules by code, in the order in which they are tried. Rules whose findings come from events only are last."""


def rule(
    code: str, *, priority: int | None = None, name: str, what: str, why: str, bad: str, good: str, fix: str
) -> Callable[[type[Rule]], type[Rule]]:
    """Return a class decorator that registers a subclass of `Rule` under `code`.

    Args:
        code: Stable code; never given to another rule.
        priority: Rank in the order of rules; smaller ones are tried first. None for rules that only record events.
        name: A few words for the finding's first line.
        what: Description of the situation.
        why: Its cost.
        bad: Code that has the fault.
        good: The same code without the fault.
        fix: One line of advice, a format string (see `Rule.fix`).
    """

    def register(cls: type[Rule]) -> type[Rule]:
        assert code not in RULES
        entry = cls()
        entry.code, entry.priority, entry.name = code, priority, name
        entry.what, entry.why, entry.bad, entry.good, entry.fix = what, why, bad, good, fix
        rules = sorted((*RULES.values(), entry), key=lambda r: (r.priority is None, r.priority or 0, r.code))
        RULES.clear()
        RULES.update({rule.code: rule for rule in rules})
        return cls

    return register
