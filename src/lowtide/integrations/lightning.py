"""A memory budget for the Trainer of Lightning."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import lightning

from lowtide.integrations.host_run import HostRun, refuse_deepspeed
from lowtide.script.fit_steps import OnInfeasible
from lowtide.script.within import Run

__all__ = ["LowtideCallback"]


class LowtideCallback(lightning.Callback):
    """Keeps the training steps of a Lightning Trainer within a memory budget.

        trainer = lightning.Trainer(callbacks=[LowtideCallback("8GiB")], ...)

    The first two steps are rehearsed, and a plan is in force from the third one on, until training ends, however it
    does. Checkpoints are those without it.

    Args:
        budget: Bytes, "8GiB" or "60%" of the plain step's peak, as for `lowtide.within`; so are all others.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        on_infeasible: OnInfeasible = "raise",
        levers: Collection[str] = (),
        in_place: bool = True,
        progress: bool = True,
    ) -> None:
        self._host = HostRun(budget, on_infeasible, levers, in_place, progress)

    @property
    def run(self) -> Run | None:
        """What `lowtide.within` gives, of the last training: its plan and verdict."""
        return self._host.run

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the Trainer's module."""
        if "deepspeed" in type(trainer.strategy).__name__.lower():
            raise refuse_deepspeed("the Trainer")
        self._host.begin(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the module back as it was, with the numbers of its plan in the Trainer's metrics."""
        for name, number in self._host.metrics().items():
            trainer.callback_metrics[name] = number
        self._host.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the module back as it was."""
        self._host.leave()
