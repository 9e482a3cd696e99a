"""Kinds of training steps, such as those of losses that alternate, and the rule by which they take turns."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.profiler.training_step import AuditedTrainingStep, Kind


N_DRAWS: Final = 8
"""Number of steps from which the one with most calls is chosen, where modules are skipped at random."""


class StepKinds:
    """Kinds of the steps so far, and an audited step of each kind, by the form of their batch."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[Kind]] = {}
        self._audited: dict[str, list[AuditedTrainingStep]] = {}
        self._drawn: set[str] = set()
        """Forms of batches on which modules are skipped at random."""

    def __bool__(self) -> bool:
        """Return True if a step was audited."""
        return bool(self._audited)

    def add_audited(self, form: str, step: AuditedTrainingStep) -> None:
        """Add an audited step, in place of an earlier one of its kind."""
        others = [audited for audited in self._audited.get(form, []) if audited.kind != step.kind]
        self._audited[form] = [*others, step]
        self.add(form, step.kind)

    def add(self, form: str, kind: Kind) -> int:
        """Add the kind of a step; return the number of kinds of steps on batches of this form."""
        kinds = self._kinds.setdefault(form, [])
        kinds.append(kind)
        return len({*kinds})

    def expected(self, form: str) -> AuditedTrainingStep | None:
        """Return the audited step that is of the kind that the next step is expected to be, if any."""
        kinds = self._kinds.get(form, [])
        if form in self._drawn:
            return self._with_most_calls(form, kinds[1:])  # only the first step may run modules that set something up
        n = next(_periods(kinds), 1)
        if 2 * n > len(kinds) and kinds[-2:-1] == kinds[-1:]:
            n = 1  # two steps of one kind tell more than a rule that has not come round twice
        kind = kinds[-n] if kinds else None
        return next((step for step in self._audited.get(form, []) if step.kind == kind), None)

    def _with_most_calls(self, form: str, kinds: list[Kind]) -> AuditedTrainingStep | None:
        """Return the audited step of `kinds` with most calls; None if further steps are to be audited."""
        if len(kinds) < N_DRAWS and not (len(kinds) > 1 and len({*kinds}) == 1):
            return None
        audited = [step for step in self._audited[form] if step.kind in kinds]
        return max(audited, key=lambda step: len(step.kind), default=None)

    def expect_skips(self, form: str) -> None:
        """Expect that steps on batches of this form skip modules at random: the one with most calls is waited for."""
        self._drawn.add(form)

    @property
    def are_drawn(self) -> bool:
        """Return True if steps skip modules at random."""
        return bool(self._drawn)

    def forget_form(self, form: str) -> None:
        """Forget the steps on batches of a form."""
        self._audited.pop(form, None)
        self._kinds.pop(form, None)

    @property
    def are_awaited(self) -> bool:
        """Return True if steps of some kind were traced but never audited, and kinds may take turns."""
        return any(
            {*kinds} - {step.kind for step in self._audited.get(form, [])} and take_turns(kinds, n_rounds=1)
            for form, kinds in self._kinds.items()
            if form not in self._drawn
        )

    def several(self) -> list[list[Kind]]:
        """Return the kinds of the steps on batches of one form, for each form with several kinds."""
        return [kinds for kinds in self._kinds.values() if len({*kinds}) > 1]


def take_turns(kinds: list[Kind], n_rounds: int = 2) -> bool:
    """Return True if steps of several kinds follow a rule: one kind after the other, or `n_rounds` of the same ones.

    Steps that follow no rule may draw their work at random.
    """
    is_periodic = any(n_rounds * n <= len(kinds) for n in _periods(kinds) if n > 1)
    return is_periodic or len(list(groupby(kinds))) == len({*kinds})


def _periods(kinds: list[Kind]) -> Iterator[int]:
    """Yield, in order, the numbers of steps after which the kinds are the same again."""
    return (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
