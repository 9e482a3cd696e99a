"""Subscriptions of `lowtide.watch`: torch's global hooks, and patches of `backward` and `zero_grad`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide._torch.backward import ENGINE, in_backward
from lowtide._torch.checkpointed_functions import observe_checkpoints
from lowtide._torch.optim import list_parameters
from lowtide._torch.patching import OBSERVED_CALL_CODE, replace_function, wrap_module_calls
from lowtide.diagnostics.leaks.call_log import collect_tensors
from lowtide.errors import LowtideError
from lowtide.memory.frame_locals import local_variables
from lowtide.utils.frames import walk_frames

if TYPE_CHECKING:
    from lowtide.diagnostics.leaks.watcher import Watch

_watching: Watch | None = None


class EventSources:
    """Subscriptions that report the process's forward passes, backward passes and optimizer steps to a watch."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Subscribe to the events of torch. Raises LowtideError while another watch runs."""
        global _watching
        if _watching is not None:
            raise LowtideError("a watch is already running, and only one can run at a time. End it first.")
        _watching = self._watch
        step = register_optimizer_step_post_hook(self._stepped)
        self._undo = [step.remove, wrap_module_calls(self._watch.forward_begins, self._watch.forward_ends)]
        self._undo += [
            observe_checkpoints(self._watch.checkpointed),
            replace_function(torch.autograd, ENGINE, self._engine),
            replace_function(Optimizer, "zero_grad", self._zero_grad),
            replace_function(nn.Module, "zero_grad", self._zero_grad),
        ]

    def remove(self) -> None:
        """Unsubscribe and restore torch."""
        global _watching
        _watching = None
        while self._undo:
            self._undo.pop()()

    def arguments(self) -> list[Tensor]:
        """Return the tensors passed to the module calls in progress; an empty list if no module is running."""
        return [tensor for value in self._values() for tensor in collect_tensors(value)]

    def takes_containers(self) -> bool:
        """Return True if an argument of a module call in progress may be a container to which the call adds tensors."""
        return not all(value is None or isinstance(value, Tensor | int | float | str) for value in self._values())

    def _values(self) -> list[Any]:
        values: list[Any] = []
        for frame in walk_frames(sys._getframe(1)):
            if frame.f_code is OBSERVED_CALL_CODE:
                with local_variables(frame) as variables:
                    values += (*(variables.get("args") or ()), *(variables.get("kwargs") or {}).values())
        return values

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._watch.optimizer_stepped(id(optimizer), _parameters(optimizer))

    def _engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        watch = self._watch

        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if in_backward():
                return original(outputs, *args, **kwargs)
            retain, create, inputs = (*args, None, None, None, None)[1:4]
            watch.backward_begins(outputs, bool(retain), bool(create), bool(inputs))
            has_failed = True
            try:
                result = original(outputs, *args, **kwargs)
                has_failed = False
            finally:
                watch.backward_ends(has_failed=has_failed)
            return result

        return run_backward

    def _zero_grad(self, original: Callable[..., None]) -> Callable[..., None]:
        watch = self._watch

        def zero_grad(owner: nn.Module | Optimizer, set_to_none: bool = True) -> None:
            watch.gradients_zeroed(_parameters(owner), set_to_none)
            original(owner, set_to_none)

        return zero_grad


def _parameters(owner: nn.Module | Optimizer) -> Iterable[Tensor]:
    return owner.parameters() if isinstance(owner, nn.Module) else list_parameters(owner)
