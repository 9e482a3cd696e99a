"""Assumed answers when a step reads unknown tensor contents, noted with the line of code, and errors for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from lowtide.errors import DataDependentStepError
from lowtide.estimator.values import known_values as contents
from lowtide.estimator.values.query_purpose import in_optimizer, passing
from lowtide.estimator.values.query_site import where

if TYPE_CHECKING:
    from lowtide.estimator.values.unknown_values import UnknownArray

MOST_ASKED = 10_000
"""Largest number of times in a row that one line of code gets an assumed answer: its loop might never end."""

SEARCHING = (
    "LBFGS is assumed to find a better point in each iteration; later steps keep more, up to two vectors as large as "
    "all parameters for each of history_size iterations"
)


class Assumptions:
    """Answers that one rehearsal has assumed for reads of unknown contents, and the first read that was refused."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}
        """The assumptions so far, each with its line, in order."""
        self.refused: DataDependentStepError | None = None
        """The first read that was refused. Cleanup code may cause more."""
        self.arrays: WeakValueDictionary[int, UnknownArray] = WeakValueDictionary()
        """Arrays of unknown numbers, by id."""
        self._asked_at, self._n_asked = "", 0
        """Line of code that last got an assumed answer, and the number of times in a row."""
        self._n_searched = 0
        """Number of losses given to LBFGS."""

    def truth(self, why: str) -> bool:
        """Return the assumed answer if code converts unknown contents to True or False.

        Raises DataDependentStepError if no answer is assumed. `why` states the effect of the answer, for the error. In
        optimizers, the answer is False: Adafactor, for example, bounds its step by the size of a parameter, which
        changes numbers, not memory.
        """
        if in_optimizer():
            self.note("a number that an optimizer compares is taken as small")
            return False
        assumed = passing()
        if assumed is None:
            raise self.refusal(why)
        self.note(assumed.why)
        if (place := where()) != self._asked_at:
            self._asked_at, self._n_asked = place, 0
        self._n_asked += 1
        if self._n_asked > MOST_ASKED:
            raise self.refusal(f"{why}, {MOST_ASKED} times in a row, as if a loop ended by nothing else")
        return assumed.answer

    def falling(self) -> float:
        """Return an assumed loss for LBFGS, smaller than the previous one."""
        self.note(SEARCHING)
        self._n_searched += 1
        return 1 / self._n_searched

    def note(self, what: str) -> None:
        """Record the assumption that `what` describes, with the line of code that made it necessary."""
        self.notes[f"{where()}: {what}"] = None

    def refusal(self, why: str) -> DataDependentStepError:
        """Return the error for a read of unknown contents, with the line of code. `why` states the read's effect."""
        received = ""
        if contents.senders:
            names = ", ".join(contents.senders)
            received = f"\n  Nor can it know what other processes send ({names}), which do not exist."
        error = DataDependentStepError(
            f"{where()}: {why}, which a step without memory can't know.{received}\n"
            "  Measure this step instead (lowtide.timeline), or decide there by something known from the batch."
        )
        self.refused = self.refused or error
        return error
