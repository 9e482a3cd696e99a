"""The request to fit a loop: its budget, and the reaction if no plan fits the budget."""

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
    """A budget for the steps of a loop, and the reaction if no plan fits it."""

    budget: int | str
    """Bytes, or text such as "85%"; a share of the GPU is replaced by bytes once the device is known."""
    budget_for: BudgetFor
    on_infeasible: OnInfeasible
    is_for_next: bool = False
    """True if an earlier model was planned: training does not end because the next model can't be planned."""

    @property
    def ends_training(self) -> bool:
        """Return True if training ends when no plan fits."""
        return self.on_infeasible == "raise" and not self.is_for_next


def check_on_infeasible(asked: str) -> OnInfeasible:
    """Return `asked` if it is a value of OnInfeasible; raise LowtideError otherwise."""
    known = get_args(OnInfeasible)
    if asked not in known:
        raise LowtideError(f"on_infeasible is {asked!r}; it takes one of {', '.join(map(repr, known))}.")
    return asked  # type: ignore[return-value]
