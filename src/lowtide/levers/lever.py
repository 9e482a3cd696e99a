"""What a lever is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lowtide.runtime.fingerprint import Optimizers, listed

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Settings = Mapping[str, float]


class LeverNotApplicable(Exception):
    """A lever can't be pulled on this model or step, or changes nothing there; the text says why."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """What levers are pulled on: a training step of a model."""

    model: nn.Module
    step: Callable[[Any], Any]
    batch: Any
    optimizer: Optimizers
    """Those that step on the model's parameters, as far as they are named or known."""
    in_place: bool = True
    """Whether gradients may be written in place."""

    @property
    def only_optimizer(self) -> Optimizer | None:
        """The optimizer, if it is a single one."""
        optimizers = listed(self.optimizer)
        return optimizers[0] if len(optimizers) == 1 else None


class ActiveLever(Protocol):
    """A lever that is on."""

    def check(self) -> None:
        """After steps with it on: raises NoUse if it changed nothing in them, or may not stay on."""

    def remove(self) -> None:
        """Take it off: model and optimizer are as before. May be called again."""


class Lever(Protocol):
    """A change of the training step that lowers its peak. One file each."""

    name: ClassVar[str]
    what: ClassVar[str]
    """What it changes, in words that follow its name."""
    exact: ClassVar[bool]
    """Whether loss, gradients, parameters and optimizer state keep their bits."""
    unavailable_results: ClassVar[frozenset[str]]
    """Kinds of results that are not there to be compared at the end of a step with it, such as `gradients`."""
    wants_optimizer: ClassVar[bool]
    """Whether it changes the optimizer."""
    free: ClassVar[bool]
    """Whether it does no more work than the plain step, by construction; else what it costs is measured."""

    def is_free(self, settings: Settings) -> bool:
        """`free`, with these settings."""
        return self.free

    def in_words(self, settings: Settings) -> str:
        """`what`, with these settings."""
        return self.what

    def settings(self, site: StepContext) -> Settings:
        """What it has to know about the step, found by looking at it or by running it once.

        Raises NoUse where it can't be pulled. Everything is as it was afterwards.
        """

    def estimated_saving(self, site: StepContext, parts: Mapping[str, int]) -> int:
        """About how many bytes it may take off a peak made of `parts`; 0 where it would not help. Runs nothing."""

    def enable(self, model: nn.Module, optimizer: Optimizer | None, settings: Settings) -> ActiveLever:
        """Change the step. Raises NoUse where that can't be done, and has then changed nothing."""
