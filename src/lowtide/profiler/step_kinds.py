"""Kinds of training steps, such as steps with alternating losses, and the rule by which the kinds take turns."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.profiler.training_step import AuditedTrainingStep, Calls, Kind


N_DRAWS: Final = 8
"""Number of steps among which the step with most calls is chosen, where modules are skipped at random."""


class StepKinds:
    """Kinds of the steps so far, and an audited step of each kind, by the form (dtypes and dimensions) of the batch."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[Kind]] = {}
        self._audited: dict[str, list[AuditedTrainingStep]] = {}
        self._drawn: set[str] = set()
        """Forms of batches on which modules are skipped at random."""

    def __bool__(self) -> bool:
        """Return True if a step was audited."""
        return bool(self._audited)

    def add_audited(self, form: str, step: AuditedTrainingStep) -> None:
        """Add an audited step, in place of an earlier audited step with the same calls."""
        others = [audited for audited in self._audited.get(form, []) if audited.kind.calls != step.kind.calls]
        self._audited[form] = [*others, step]
        self.add(form, step.kind)

    def add(self, form: str, kind: Kind) -> int:
        """Add the kind of a step on a batch of this form.

        Returns the number of kinds on such batches, counting kinds with equal module calls once.
        """
        kinds = self._kinds.setdefault(form, [])
        kinds.append(kind)
        return len({kind.calls for kind in kinds})

    def expected(self, form: str) -> AuditedTrainingStep | None:
        """Return the audited step with the calls that the next step is expected to make, if any."""
        kinds = self._kinds.get(form, [])
        if form in self._drawn:
            return self._with_most_calls(form, kinds[1:])  # only the first step may run modules that set something up
        n = next(_periods(kinds), 1)
        if 2 * n > len(kinds) and kinds[-2:-1] == kinds[-1:]:
            n = 1  # two steps of one kind in a row say more than a round that has not yet been repeated
        audited = self._audited.get(form, [])
        return next((step for step in audited if kinds and step.kind.calls == kinds[-n].calls), None)

    def _with_most_calls(self, form: str, kinds: list[Kind]) -> AuditedTrainingStep | None:
        """Return the audited step with most module calls, among the steps of `kinds`.

        Return None if too few steps have run to choose one, or if none of these kinds was audited: then steps are
        audited.
        """
        if len(kinds) < N_DRAWS and not (len(kinds) > 1 and len({*kinds}) == 1):
            return None
        calls = {kind.calls for kind in kinds}
        audited = [step for step in self._audited[form] if step.kind.calls in calls]
        return max(audited, key=lambda step: len(step.kind.calls), default=None)

    def expect_skips(self, form: str) -> None:
        """Record that steps on batches of this form skip modules at random: `expected` then waits for the step with the
        most calls.
        """
        self._drawn.add(form)

    @property
    def are_drawn(self) -> bool:
        """Return True if steps skip modules at random."""
        return bool(self._drawn)

    def are_irregular(self, form: str, calls: Calls) -> bool:
        """Return True if steps with these module calls, on batches of this form, differ in backward and do not take
        turns.
        """
        kinds = [kind for kind in self._kinds.get(form, []) if kind.calls == calls]
        return len({*kinds}) > 1 and not any(2 * n <= len(kinds) for n in _periods(kinds))

    def forget_form(self, form: str) -> None:
        """Forget the steps on batches of a form."""
        self._audited.pop(form, None)
        self._kinds.pop(form, None)

    @property
    def are_awaited(self) -> bool:
        """Return True if steps of some kind were traced but never audited, and kinds may take turns."""
        return any(
            {kind.calls for kind in kinds} - {step.kind.calls for step in self._audited.get(form, [])}
            and take_turns(kinds, n_rounds=1)
            for form, kinds in self._kinds.items()
            if form not in self._drawn
        )

    def all(self) -> frozenset[Kind]:
        """Return the kinds of all steps so far."""
        return frozenset(kind for kinds in self._kinds.values() for kind in kinds)

    @property
    def n_in_round(self) -> int:
        """The number of steps after which the sequence of kinds repeats itself; 1 if it does not."""
        rounds = (next(_periods(kinds), 1) for kinds in self._kinds.values())
        return max(rounds, default=1)

    def is_early(self, form: str, kind: Kind) -> bool:
        """Return True if only the first steps were of this kind, so that its recorded steps may lack optimizer state.

        Another kind with the same module calls may update further parameters, whose state is created then. The first
        steps are as many as there are such kinds; after N_DRAWS steps in all, no kind counts as early.
        """
        kinds = self._kinds[form]
        n_alike = len({other for other in kinds if other.calls == kind.calls})
        return n_alike > 1 and len(kinds) < N_DRAWS and len(kinds) - kinds[::-1].index(kind) <= n_alike

    def several(self) -> list[list[Kind]]:
        """Return, for each form of batch on which steps of several kinds ran, the kinds of these steps in order."""
        return [kinds for kinds in self._kinds.values() if len({*kinds}) > 1]


def take_turns(kinds: list[Kind], n_rounds: int = 2) -> bool:
    """Return True if steps of several kinds follow a rule: all steps of a kind in a row, or `n_rounds` equal rounds.

    Steps that follow no rule may draw their work at random.
    """
    is_periodic = any(n_rounds * n <= len(kinds) for n in _periods(kinds) if n > 1)
    return is_periodic or len(list(groupby(kinds))) == len({*kinds})


def follow_rule(kinds: list[Kind]) -> bool:
    """Return True if steps of several kinds take turns, or differ only in backward, whatever their order."""
    return len({kind.calls for kind in kinds}) == 1 or take_turns(kinds)


def _periods(kinds: list[Kind]) -> Iterator[int]:
    """Yield, in ascending order, the numbers of steps after which the sequence of kinds repeats itself."""
    return (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
