"""What happens to the steps of a script that are found (`step_detector.py`): a rehearsal, a plan, a look ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.errors import RehearsalError


class Enough(BaseException):
    """Ends a script of which nothing more need be seen. No Exception: scripts catch those."""


class StepListener:
    """Who works on the steps. What a crew does not care for it leaves as it is here: nothing happens."""

    done = False
    """Nothing is left to do: the steps need not be watched any longer."""

    @property
    def awaits(self) -> str:
        """What has to happen to the model before that, in words."""
        raise NotImplementedError

    def begins(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """`model` is about to be called with `batch`, (args, kwargs), for the first time in a step."""
        raise NotImplementedError

    def precedes(self, module: nn.Module) -> None:
        """`module` was called, and not trained, since the last step: one begins now, and has perhaps begun before."""

    def goes_on(self, batch: Any) -> None:
        """A module that nobody calls is about to be called with `batch` in a step that has begun."""

    def ends(self, model: nn.Module) -> None:
        """The optimizer has updated the model. Called from its hook mostly: no hooks may be added or removed here."""
        raise NotImplementedError

    def gives_up(self, model: nn.Module) -> None:
        """`model` began a step, but it is another one that is trained, or is trained from here on.

        Then there is something left to do again.
        """
        raise NotImplementedError

    def finds(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        """It is `model` that is trained: a step of it is over that was not seen. Called from an optimizer's hook."""

    def is_updated(self, model: nn.Module) -> bool:
        """Whether parameters of `model` were changed since this was asked last, and that may be the end of a step.

        Asked where no optimizer has stepped so far. If nobody can tell, as here, such a step has no end.
        """
        return False

    def loses_track(self, why: RehearsalError) -> None:
        """Where a step ends can't be known: raise `why`, or be done without that."""
        raise why

    def passes_over(self) -> None:
        """Nothing is left to do, and something else is trained. Called from an optimizer's hook, once."""

    def lets_go(self) -> None:
        """Nothing is left to do, and no other model takes turns: hold the model no longer. As for hooks, see `ends`."""

    def wants_more(self) -> bool:
        """Return True if steps are to be watched again. Asked after each update once nothing was left to do."""
        return False

    def finish(self) -> None:
        """The script has ended, and nothing failed: make do with what there is."""

    def leaves(self) -> None:
        """The watch is over: take everything out that is in force for a step only."""
