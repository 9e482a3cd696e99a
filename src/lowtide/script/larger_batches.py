"""Batches that are larger than the planned ones, and the decision which of them is rehearsed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from lowtide.profiler.online import PATIENCE
from lowtide.runtime.batch_tensors import collect_tensors, put_in_words
from lowtide.runtime.call_shapes import elements, parse_shapes
from lowtide.runtime.planned_engine import find_most_elements
from lowtide.state.process_group import several_processes

if TYPE_CHECKING:
    from lowtide.planner.records import Plan

GROWTHS: Final = 12
"""Largest number of plans made for larger batches, one after the other: enough for ten thousand random sizes."""


class LargerBatches:
    """The search for batches that exceed all planned sizes: each gets its own plan, and earlier plans stay."""

    def __init__(self) -> None:
        self.has_optimizers = False
        """False if the program updates the model without an optimizer of torch."""
        self.is_outgrown = False
        """True once a batch was larger than the batches of all plans."""
        self.is_rehearsed = False
        """True if this step's batch is larger than all planned ones."""
        self._n_looked: int | None = None
        """Number of steps in which another batch of the outgrown size was waited for; None if none is awaited."""
        self._n_growths = 0

    @property
    def is_awaited(self) -> bool:
        """Return True if another batch that is larger than all planned batches is still to be rehearsed."""
        return self._n_looked is not None

    @property
    def has_waited_enough(self) -> bool:
        """Return True if many steps have passed without another batch that is larger than all planned batches."""
        return self._n_looked is not None and self._n_looked >= PATIENCE

    def can_be_planned(self, plan: Plan) -> bool:
        """Return True if a batch that is larger than the batches of `plan` can get another plan."""
        # with several sizes in a step, a part of a large step would get the plan for a small one
        is_one_size = len(plan.input_shapes) == 1
        return is_one_size and self.has_optimizers and not several_processes() and self._n_growths < GROWTHS

    def await_next(self) -> None:
        """Begin to wait for another batch that is larger than all planned batches."""
        self._n_looked = 0

    def look_at(self, plan: Plan, batch: Any) -> bool:
        """Count this step; return True if its batch has more elements than the batches that `plan` covers."""
        assert self._n_looked is not None
        self._n_looked += 1
        return elements(parse_shapes(put_in_words(collect_tensors(batch)))) > find_most_elements(plan)

    def end_wait(self) -> None:
        """Stop waiting for a larger batch; the current plan stays."""
        self._n_looked = None

    def count_plan(self) -> None:
        """Count a plan for a larger batch, which was rehearsed, and stop waiting for the batch."""
        self._n_looked = None
        self._n_growths += 1

    def give_up(self) -> None:
        """Make no more plans for larger batches."""
        self._n_looked = None
        self._n_growths = GROWTHS
