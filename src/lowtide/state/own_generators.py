"""What a call draws from generators of the model's own, which a replay would draw once more.

A replay sets back torch's random numbers, those of the generators that its modules and arguments have, and the global
ones of Python and NumPy. Nobody sets back other generators that the model's code can reach: who draws from one of them
is not replayed, and after a trial they are as they were.
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


class OwnDraws:
    """The generators of torch, NumPy and Python that a model's code can reach."""

    def __init__(self, model: nn.Module) -> None:
        self._generators = ReachableState(model, *(module.forward for module in model.modules())).generators

    def states(self) -> list[tuple[Callable[[Any], object], Any]]:
        """For each how its state is set, and what it is."""
        return list(map(state_of, self._generators))

    def put_back(self, before: list[tuple[Callable[[Any], object], Any]]) -> bool:
        """Set the states that were `before`; whether any had changed."""
        drawn = [
            (set_state, state)
            for (set_state, state), (_, now) in zip(before, self.states(), strict=True)
            if pickle.dumps(state) != pickle.dumps(now)
        ]
        for set_state, state in drawn:
            set_state(state)
        return bool(drawn)
