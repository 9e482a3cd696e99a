"""Messages to the user about a plan in force, each reported once."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from lowtide._torch.fake_modes import without_function_modes
from lowtide._torch.tensors import is_same_memory
from lowtide.runtime.inplace_methods import SHARES_MEMORY

if TYPE_CHECKING:
    from torch import Tensor, nn

MEASURED = "The next steps are measured: if one is over the budget, another plan is made"


class PlanMessages:
    """Reporter of messages to the user about a plan on `model`, each of them once."""

    def __init__(self, model: nn.Module) -> None:
        self.tell: Callable[[str], object] = warnings.warn
        """Function that is called with each message."""
        self.is_taken: Callable[[], bool] = lambda: False
        """Function that returns True if steps that differ from the rehearsed ones get another plan when they need it.
        """
        self._model = model
        self._said: set[str] = set()
        self._has_given_away = False
        """True once a message reported a tensor that was copied because a NumPy array shares its memory."""

    def say(self, what: str) -> None:
        """Report a message, unless the same text was reported before."""
        if what not in self._said:
            self._said.add(what)
            self.tell(what)

    def say_different(self, what: str, advice: str) -> None:
        """Report a difference from the rehearsed step, once; `advice` is added if no new plan will be made for it."""
        if what not in self._said:
            self._said.add(what)
            self.say(f"{what}. {MEASURED if self.is_taken() else advice}")

    def say_copied(self, tensor: Tensor, who: str) -> None:
        """Report that `tensor` was copied before `who` writes to it, because a recompute or replay still reads it.

        If `who` is the method that shares memory with a NumPy array, only the first tensor is reported: a histogram of
        all weights calls that method for each of them.
        """
        if who == SHARES_MEMORY:
            if self._has_given_away:
                return
            self._has_given_away = True
        own = self.find_own_tensor(tensor)
        name = "a tensor" if own is None else own[0]
        writes = "gives away the memory of" if who == SHARES_MEMORY else "writes to"
        self.say(
            f"{who} {writes} {name} ({list(tensor.shape)} {tensor.dtype}) between forward and backward, and the "
            "plan reads it again after that: it was copied first, so the peak may be above the budget. Fit, or "
            "rehearse and plan, in a step that does so."
        )

    def find_own_tensor(self, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the model's parameter or buffer that has the memory of `tensor`, with its name; None if there is
        none.
        """
        named = itertools.chain(self._model.named_parameters(), self._model.named_buffers())
        with without_function_modes():  # a parameter that a replay replaced by `_Changed` would raise and search again
            return next(((name, own) for name, own in named if is_same_memory(own, tensor)), None)
