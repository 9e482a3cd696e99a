"""Protocols of levers: changes of the training step that lower its peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lowtide.runtime.live_optimizers import Optimizers, listed

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Settings = Mapping[str, float]

ONE_OPTIMIZER = (
    "it works with the only optimizer of a model, and none or several were found: pass optimizer= if there is one"
)


class LeverNotApplicable(Exception):
    """Error for a lever that can't be enabled on this model or step, or changes nothing there; the text says why."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """A training step, with the model, batch and optimizers that it uses, for which levers are tried."""

    model: nn.Module
    step: Callable[[Any], Any]
    batch: Any
    optimizer: Optimizers
    """Optimizers that step on the model's parameters, if given or detected."""
    in_place: bool = True
    """True if backward kernels may overwrite an incoming gradient with their result."""
    inside_blocks: bool = True
    """True if plans may choose the saved tensors of blocks that inductor compiles."""

    @property
    def only_optimizer(self) -> Optimizer | None:
        """The only optimizer; None if there are none or several."""
        optimizers = listed(self.optimizer)
        return optimizers[0] if len(optimizers) == 1 else None


class ActiveLever(Protocol):
    """Protocol of an enabled lever, the object that `Lever.enable` returns."""

    def check(self) -> None:
        """Check, after one or more steps with the lever on, that the lever took effect and may stay on.

        Raises LeverNotApplicable if it changed nothing in the steps, or must not stay on.
        """

    def remove(self) -> None:
        """Turn the lever off, which restores model and optimizer. Repeated calls do nothing."""


class Lever(Protocol):
    """Protocol of levers, changes of the training step that lower its peak. Each lever's file has a subclass."""

    name: ClassVar[str]
    what: ClassVar[str]
    """Description of the lever's effect, printed after its name."""
    exact: ClassVar[bool]
    """True if loss, gradients, parameters and optimizer state keep their bits."""
    unavailable_results: ClassVar[frozenset[str]]
    """Kinds of results, such as `gradients`, that don't exist after a step with the lever, and so can't be compared."""
    wants_optimizer: ClassVar[bool]
    """True if the lever changes the optimizer."""
    free: ClassVar[bool]
    """True if the lever by construction does no more work than the plain step; else its cost is measured."""
    is_last_resort: ClassVar[bool] = False
    """True if the lever is tried only where no plan fits without it."""
    is_repeatable: ClassVar[bool] = False
    """True if each call of the model has one forward and one backward pass, so that a step which ran out of memory can
    be repeated.
    """
    needs_whole_compile: ClassVar[bool] = False
    """True if the lever changes only models that are compiled as a whole."""
    takes_number: ClassVar[bool] = False
    """True if the lever runs the batch in a number of pieces, its only setting `n`."""

    def is_free(self, settings: Settings) -> bool:
        """Return True if the lever with these settings does no more work than the plain step."""
        return self.free

    def put_in_words(self, settings: Settings) -> str:
        """Return a description of the lever's effect with these settings, printed after its name."""
        return self.what

    def settings(self, site: StepContext) -> Settings:
        """Find the lever's settings for a step by inspecting the step or running it once.

        Raises LeverNotApplicable if the lever can't be enabled. All state is restored.
        """

    def estimate_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """Estimate the bytes by which the lever may lower a peak, without running the step; 0 if it can't help.

        `parts` holds the bytes of each category at the peak.
        """

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> ActiveLever:
        """Turn the lever on for `model` and `optimizer`. If that fails, raises LeverNotApplicable, changing nothing."""
