"""The registry of watch rules: `@rule(code, ...)` on a class that says which retained objects the rule applies to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.call_log import SiteStats
    from lowtide.diagnostics.leaks.holder_history import History
    from lowtide.diagnostics.leaks.holders import Holder
    from lowtide.diagnostics.leaks.retained_object import RetainedObject


class Rule:
    """Base class of rules, one subclass per kind of finding. `Entry.judge` asks each rule about a retained object."""

    code: str
    priority: int | None
    """Position in the order in which rules are tried on a retained object; the first match counts. None for a rule that
    only events report.
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
    """True if a later backward pass through the graph withdraws the finding."""
    explains_missing_backward = False
    """True if the finding explains why no backward pass reached calls of its site."""
    claims_graph = False
    """True if a graph stays with the holder first found for it, whatever else holds it later."""
    subjects: tuple[str, ...] = ("tensors",)
    """Retained objects that the rule judges (`RetainedObject.subject`)."""
    ends_without_growth = False
    """True if the finding is withdrawn when its container stops growing."""
    ends_without_change = False
    """True if the finding is withdrawn when the same memory, computed once for all, is held through several steps."""
    fix_of_container = ""
    """Fix where a container gathers the tensors, so that its name must not be deleted or set to None."""
    fix_of_part = ""
    """Fix where an entry or attribute of the variable holds the tensors."""
    gathers = False
    """True for containers that gather outputs, which explains outputs of the same line that outlive their step."""
    unit = ""
    """Words printed after the bytes, such as "of host memory a step"."""
    must_last = False
    """True if the finding is void unless the outputs are still alive when a backward pass of the next step begins."""
    superseded_by = ""
    """Code of a rule whose finding on the same holder replaces this one."""
    follows_from: tuple[str, ...] = ()
    """Codes of rules whose finding on the same backward pass is the reason for this one, which is left out then."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        """Return True if `item` is a case of this rule, given the history of its holder."""
        return False

    def names_holder(self, item: RetainedObject) -> bool:
        """Return True if the finding is to name the holder of `item`, and to give advice about it."""
        return True

    def names_part(self, holder: Holder, history: History) -> bool:
        """Return True if the advice for `holder` is about its entry or attribute, not about the whole variable."""
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
        """Return True if a finding of this rule is to be withdrawn, because its container no longer grows."""
        return self.ends_without_growth and history.has_stopped

    def count_reported_bytes(self, history: History) -> int:
        """Return the bytes that a finding of this rule reports."""
        return history.held_bytes[-1]

    def fix_unreached(self, fix: str) -> str:
        """Return the advice to give instead of `fix` if no backward pass reaches any graph made at the line."""
        return fix

    def refined(self, stats: SiteStats) -> Rule:
        """Return the rule to report instead of this one, given all calls of the site; by default this rule."""
        return self


RULES: dict[str, Rule] = {}
"""All rules by code, in the order in which they are tried; rules that only events report come last."""


def rule(
    code: str, *, priority: int | None = None, name: str, what: str, why: str, bad: str, good: str, fix: str
) -> Callable[[type[Rule]], type[Rule]]:
    """Return a class decorator that registers a subclass of `Rule` under `code`.

    Args:
        code: Stable code; never given to another rule.
        priority: Place in the order of rules; smaller ones are tried first. None for a rule that only events report.
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
