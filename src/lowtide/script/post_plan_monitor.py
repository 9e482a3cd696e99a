"""Monitor optimizer steps after the last observed training step: the script may train another model from then on."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from lowtide._torch.device_timing import now_ms
from lowtide.runtime.fingerprint import find_device
from lowtide.script.alternating_models import collect_held_ids, ids, parameter_ids

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.script.step_listener import StepListener


N_TIMED: Final = 10
"""Number of steps whose mean time is measured. If training ends earlier, only the first of them counts."""
N_UNTIMED: Final = 2
"""Number of steps before the timed ones, in which the plan still learns where its operands are."""
N_INSTEAD: Final = 2
"""Number of updates of other models after which one of them takes the planned model's place. Reference cycles keep a
model that has a plan alive until garbage is collected, so its end comes too late as a sign.
"""


class PostPlanMonitor:
    """A monitor that tells the listener once if another model is trained, and once how long a step takes.

    The monitor holds only weak references. With `finds_next`, it also detects that another model has replaced the
    planned one.
    """

    def __init__(
        self, listener: StepListener, model: nn.Module, optimizers: Iterable[Optimizer], *, finds_next: bool
    ) -> None:
        self._listener, self._finds_next = listener, finds_next
        self.n_others = 0
        """Number of updates of other models since the planned model's last update, if a next model is looked for."""
        self.model = weakref.ref(model)
        self._modules = [weakref.ref(module) for module in model.modules()]
        mine = parameter_ids(model)
        self.known = {weakref.ref(o): None for o in optimizers if mine & collect_held_ids(o)}
        """Optimizers of the model, including those that were first observed after the plan was made."""
        self._place = find_device(model)
        self._timed: int | None = None
        """Id of the optimizer whose updates are timed: the first one that updates."""
        self._n_timed = 0
        self.is_timing = listener.is_timed
        """False once the mean time of a step is known."""
        self._began_ms = 0.0
        self._mean_ms: float | None = None
        """Mean time of the timed steps so far."""

    def optimizers(self) -> list[Optimizer]:
        """Return the model's optimizers that are alive."""
        return [optimizer for known in self.known if (optimizer := known()) is not None]

    def count_time(self, optimizer: Optimizer) -> None:
        """Count an update; after the last timed step, report the mean time of a step to the listener."""
        self._timed = self._timed or id(optimizer)
        if id(optimizer) != self._timed:
            return
        self._n_timed += 1
        n = self._n_timed - N_UNTIMED
        if n == 0:
            self._began_ms = now_ms(self._place)
        elif n in (1, N_TIMED):  # now_ms waits for a GPU
            self._mean_ms = (now_ms(self._place) - self._began_ms) / n
        if n == N_TIMED:
            self.ended()

    def ended(self) -> None:
        """Report the mean time of a step to the listener, if a step was timed and the time is not reported yet."""
        if self.is_timing and self._mean_ms is not None:
            self.is_timing = False
            self._listener.on_timed(self._mean_ms)

    def updated(self, optimizer: Optimizer) -> bool:
        """Record a step of an optimizer that is not known to update the planned model.

        Return True if its model replaces the planned model: the planned model was freed, or other models were updated
        N_INSTEAD times since its last update.
        """
        if not self._modules:
            return False
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if any(collect_held_ids(optimizer) & ids(module.parameters(recurse=False)) for module in modules):
            self.known[weakref.ref(optimizer)] = None
            return False
        self.n_others += 1
        if self._finds_next:
            return not modules or self.n_others == N_INSTEAD
        self._modules.clear()
        self._listener.on_unplanned_model()
        return False
