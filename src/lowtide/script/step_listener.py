"""Callbacks for the detected steps of a script (`step_detector.py`); rehearsals, plans and estimates override them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer


class StopScript(BaseException):
    """Signal that ends a script when no more steps have to be observed. It is no Exception, because scripts may catch
    every Exception.
    """


class StepListener:
    """Base class of the objects that `StepDetector` informs about a program's steps. Optional callbacks do nothing
    here.
    """

    done = False
    """True once all work is done: no more steps need to be detected."""

    is_timed = True
    """False if the mean time of a step is known."""

    plans_next = False
    """True if the listener repeats its work for a model that is trained after the first one: see `on_next_model`."""

    plans_compiled = True
    """False if the listener ignores compiled functions and handles only the modules that they call."""
    compiled: Callable[..., Any] | None = None
    """The compiled function, or wrapper, through which the program calls the model, if any."""

    @property
    def n_missing(self) -> int:
        """The number of further steps that the listener needs, if they are like the steps so far."""
        return 1

    @property
    def awaits(self) -> str:
        """Clause, for error messages, that says which event the listener waits for: "took a step under its plan"."""
        raise NotImplementedError

    def on_step_begin(self, model: nn.Module, batch: Any, optimizers: tuple[Optimizer, ...]) -> None:
        """React to a step that begins, just before its first call of `model`, whose arguments are `batch`, (args,
        kwargs).
        """
        raise NotImplementedError

    def on_earlier_call(self, module: nn.Module) -> None:
        """React to a call of `module`, which is not trained, after the last step: the next step may have begun with
        this call.
        """

    def on_further_call(self, batch: Any) -> None:
        """React to a further call of a module in the current step, just before the call; `batch` has its arguments."""

    def on_inner_call(self, called: Callable[..., Any], batch: Any) -> None:
        """React to a call of a module or compiled function inside a step, just before the call; `batch` has its
        arguments.
        """

    def on_step_end(self, model: nn.Module) -> None:
        """React to the end of a step: the optimizer has updated `model`.

        Mostly called from the optimizer's hook: no hooks may be added or removed here.
        """
        raise NotImplementedError

    def on_model_replaced(self, model: nn.Module) -> None:
        """Forget `model`, with which a step began, because the program trains another model.

        Steps of the new model are then observed from the beginning.
        """
        raise NotImplementedError

    def is_abandoned(self, model: nn.Module, other: nn.Module) -> bool:
        """Return True if no variable holds `model` any longer, and the program has called `other` instead."""
        return False

    def on_model_found(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        """React to the first update of `model`, a frozen model with a trained prompt: only now is it known to be
        trained.

        The model's first step was not observed. Called from an optimizer's hook.
        """

    def detect_update(self, model: nn.Module) -> bool:
        """Return True if parameters of `model` changed since the last call, which may be the end of a step.

        Called if no optimizer has stepped so far. Only listeners with fake tensors override it: the detector itself
        sees changes of real parameters.
        """
        return False

    def on_processes_start(self) -> None:
        """React to `torch.multiprocessing.spawn`, which starts processes before anything is trained in this one."""

    def on_timed(self, step_ms: float) -> None:
        """Receive the mean time of a step, once, after all work is done. Called by an optimizer's hook or at the
        end.
        """

    def on_unplanned_model(self) -> None:
        """React to the training of another model after all work is done.

        Called from an optimizer's hook, once for each model on which work is done.
        """

    def on_next_model(self) -> None:
        """Forget the last model, because another model is trained and its steps are detected from now on.

        Called if `plans_next`, from an optimizer's hook, where no hooks may be changed.
        """

    def on_release(self) -> None:
        """Drop the references to the model: all work is done, and no other model takes turns with this one.

        Hooks must not be changed, as in `on_step_end`.
        """

    def on_later_update(self) -> bool:
        """Return True if more steps are needed. Called after each update once all work is done."""
        return False

    def finish(self) -> None:
        """Finish the work with the steps observed so far, because the script has ended without an error."""

    def on_stop(self) -> None:
        """Remove recordings, hooks and other things that are for one step only, because detection is over."""
