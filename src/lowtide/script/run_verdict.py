"""The verdict on a plan in a loop: the memory measured in training, and the bits that were compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lowtide.report.run_record import Proof
from lowtide.units import format_apart
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.rendering import Displayed, format_repr

AUDITED: Final = "every recipe and replay was compared with the original tensors, bit by bit"
COMPARED: Final = "compiled code under the plan was compared with the plain compiled code on a batch, bit by bit"
NOT_COMPARED: Final = "there was no room to compare bits"
NOT_COPIED: Final = "bits were not compared, because some arguments of compiled code can't be copied"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunVerdict(Displayed):
    """Memory of the steps for which a plan was made, as measured in training."""

    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    """Largest peak of the measured steps, static memory included; in reserved bytes if the budget is for those. None if
    no step could be measured.
    """
    budget_for: BudgetFor = "requested"
    is_of_planned_size: bool
    """False if all measured batches were smaller than the planned ones."""
    proof: str = AUDITED
    """Result of comparing the bits, in words."""

    @property
    def within_budget(self) -> bool:
        """Return True if the measured peak is within the budget."""
        return self.measured_peak_bytes is not None and self.measured_peak_bytes <= self.budget_bytes

    def to_proof(self) -> Proof:
        """Return this verdict as the proof in a report."""
        return Proof(measured_peak_bytes=self.measured_peak_bytes, is_within_budget=self.within_budget, text=str(self))

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, str(self))

    def __str__(self) -> str:
        if self.measured_peak_bytes is None:
            return f"NOT MEASURED: no step of the planned size came; {self.proof}"
        budget, measured = format_apart(self.budget_bytes, self.measured_peak_bytes)
        size = "" if self.is_of_planned_size else " on smaller batches than the planned ones"
        relation = "within" if self.within_budget else "OVER"
        peak = "reserved peak" if self.budget_for == "reserved" else "peak"
        return f"{measured} {peak} measured{size}: {relation} the budget of {budget}; {self.proof}"
