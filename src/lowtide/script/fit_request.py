"""The request to fit a loop: its budget, and the reaction to one that no plan fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.utils.amounts import BudgetFor

OnInfeasible = Literal["raise", "smallest", "plain"]
"""Reactions to a budget that no plan fits: raise, continue under the plan with the smallest peak, or continue without a
plan.
"""


@dataclass(slots=True, kw_only=True)
class FitRequest:
    """A budget for the steps of a loop."""

    budget: int | str
    """In bytes or in words, as "85%"; in bytes once the device is known."""
    budget_for: BudgetFor
    on_infeasible: OnInfeasible
    is_for_next: bool = False
    """True if a model was planned before: training does not end because the one that is trained next can't be."""

    @property
    def ends_training(self) -> bool:
        """Return True if training ends where no plan fits."""
        return self.on_infeasible == "raise" and not self.is_for_next


def check_on_infeasible(asked: str) -> OnInfeasible:
    """Return `asked` if it is a value of OnInfeasible; raise LowtideError otherwise."""
    known = get_args(OnInfeasible)
    if asked not in known:
        raise LowtideError(f"on_infeasible is {asked!r}; it takes one of {', '.join(map(repr, known))}.")
    return asked  # type: ignore[return-value]
