"""A memory budget for the Trainer of transformers, and for derived ones such as TRL's."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lowtide.integrations.host_run import BudgetCallback
from lowtide.profiler.preconditions import refuse_deepspeed

__all__ = ["LowtideCallback"]


class LowtideCallback(BudgetCallback, TrainerCallback):
    """A callback that keeps the training steps of a Trainer within a memory budget.

        trainer = Trainer(model, args, callbacks=[LowtideCallback("8GiB")], ...)

    The first two steps are rehearsed. A plan is in force from the third step on, until training ends. Checkpoints are
    the same as without the callback. Budget, peak and extra time are in the Trainer's logs as `lowtide_...`.

    A Trainer calls no callback after an exception or Ctrl-C: the model then keeps its plan until training begins again,
    or until `close()`.

    Args:
        budget: Bytes, "8GiB" or "60%" of the plain step's peak, as for `lowtide.within`.
        budget_for: As for `lowtide.within`.
        on_infeasible: As for `lowtide.within`.
        levers: As for `lowtide.within`.
        in_place: As for `lowtide.within`.
        retry: As for `lowtide.within`.
        progress: As for `lowtide.within`.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter a `lowtide.within` block for the Trainer's model."""
        if args.deepspeed:
            raise refuse_deepspeed("the Trainer")
        self._host.begin(kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the model when training has ended."""
        self._host.end()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the plan's numbers to the logs of training."""
        logs = kwargs.get("logs")
        if logs is not None and "loss" in logs:
            logs.update(self._host.metrics())
            if state.log_history:
                state.log_history[-1].update(self._host.metrics())

    def close(self) -> None:
        """Restore the model after an exception has ended training."""
        self._host.leave()
