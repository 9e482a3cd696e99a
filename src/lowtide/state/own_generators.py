"""Random numbers that a call draws from the model's own generators, which a replay would draw once more.

A replay restores torch's RNG state, the generators of its modules and arguments, and the global ones of Python and
NumPy. It does not restore other generators that the model's code can reach: a call that draws from such a generator is
not replayed, and after a trial the generators' states are put back.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from lowtide.state.reachable_state import ReachableState
from lowtide.state.step_snapshot import state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

DRAWS = "it draws from a generator of random numbers that a replay does not set back"


class OwnGenerators:
    """The generators of torch, NumPy and Python that a model's code can reach."""

    def __init__(self, model: nn.Module) -> None:
        self._generators = ReachableState(model, *(module.forward for module in model.modules())).generators

    def states(self) -> list[tuple[Callable[[Any], object], Any]]:
        """Return, for each generator, the function that sets its state, and the present state."""
        return list(map(state_of, self._generators))

    def restore(self, before: list[tuple[Callable[[Any], object], Any]]) -> bool:
        """Set the states to `before`; return True if any had changed."""
        drawn = [
            (set_state, state)
            for (set_state, state), (_, now) in zip(before, self.states(), strict=True)
            if pickle.dumps(state) != pickle.dumps(now)
        ]
        for set_state, state in drawn:
            set_state(state)
        return bool(drawn)
