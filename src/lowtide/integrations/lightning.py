"""A memory budget for the Trainer of Lightning."""

from __future__ import annotations

from typing import Any

import lightning

from lowtide.integrations.host_run import BudgetCallback
from lowtide.profiler.preconditions import refuse_deepspeed

__all__ = ["LowtideCallback"]


class LowtideCallback(BudgetCallback, lightning.Callback):
    """A callback that keeps the training steps of a Lightning Trainer within a memory budget.

        trainer = lightning.Trainer(callbacks=[LowtideCallback("8GiB")], ...)

    The first two steps are rehearsed. A plan is in force from the third step on, until training ends, also by an
    exception. Checkpoints are the same as without the callback.

    Args:
        budget: Bytes, "8GiB" or "60%" of the plain step's peak, as for `lowtide.within`.
        budget_for: As for `lowtide.within`.
        on_infeasible: As for `lowtide.within`.
        levers: As for `lowtide.within`.
        in_place: As for `lowtide.within`.
        retry: As for `lowtide.within`.
        progress: As for `lowtide.within`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Enter a `lowtide.within` block for the Trainer's module."""
        if "deepspeed" in type(trainer.strategy).__name__.lower():
            raise refuse_deepspeed("the Trainer")
        self._host.begin(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the module, and add the numbers of its plan to the Trainer's metrics."""
        for name, number in self._host.metrics().items():
            trainer.callback_metrics[name] = number
        self._host.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the module after an exception has ended training."""
        self._host.leave()
