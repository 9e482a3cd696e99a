"""Memory budgets for training loops of other packages, from the loop's begin event to its end event."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from lowtide.script.fit_request import OnInfeasible
from lowtide.script.within import Run, within
from lowtide.state.watched_process import forget_left_over, left_over
from lowtide.utils.amounts import BudgetFor
from lowtide.utils.frames import module_name, walk_frames

if TYPE_CHECKING:
    from torch import nn


class HostRun:
    """A `lowtide.within` block that one callback of a training loop enters and another one leaves.

    If an exception ends the loop, the loop may never call the second callback. The block is then left when training
    begins again, when another block begins, or by `leave`.
    """

    def __init__(self, new_run: Callable[..., Run]) -> None:
        new_run()  # raises here if the budget is invalid
        self._new_run = new_run
        self.run: Run | None = None
        self._is_open = False

    def begin(self, model: nn.Module) -> None:
        """Enter a `lowtide.within` block for `model`. Call this from a callback of the loop that trains the model: the
        loop's function is looked up on the stack.
        """
        self.leave()
        self.run = self._new_run(model=model)
        self._loop = _Loop()
        self.run.__enter__()
        self._is_open = True
        left_over.append(self._leave_if_over)

    def end(self) -> None:
        """Restore the model after training. If the loop has caught an error of the plan, raise that error again."""
        if self._is_open:
            assert self.run is not None
            self._close()
            self.run.__exit__(None, None, None)

    def leave(self) -> None:
        """Restore the model after an exception has ended training. Repeated calls do nothing."""
        if self._is_open:
            assert self.run is not None
            self._close()
            self.run.leave()

    def metrics(self) -> dict[str, float]:
        """Return `Run.metrics()` of the current block for the loop's logs; an empty dict before training."""
        return {} if self.run is None else self.run.metrics()

    def _close(self) -> None:
        self._is_open = False
        forget_left_over(self._leave_if_over)

    def _leave_if_over(self) -> None:
        if self._loop.is_over():
            self.leave()


class BudgetCallback:
    """Base class of callbacks for the Trainers of other packages. Its arguments are those of `lowtide.within`."""

    def __init__(
        self,
        budget: int | str,
        *,
        budget_for: BudgetFor = "requested",
        on_infeasible: OnInfeasible = "raise",
        levers: Collection[str] = (),
        in_place: bool = True,
        retry: bool = False,
        progress: bool = True,
    ) -> None:
        self._host = HostRun(
            partial(
                within,
                budget,
                budget_for=budget_for,
                on_infeasible=on_infeasible,
                levers=levers,
                in_place=in_place,
                retry=retry,
                progress=progress,
            )
        )

    @property
    def run(self) -> Run | None:
        """Return the `lowtide.within` block of the last training, with its plan and verdict; None before training."""
        return self._host.run


class _Loop:
    """The running function of another package that contains the training loop, such as `Trainer.train`."""

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and module_name(frame).startswith("lowtide."):
            frame = frame.f_back
        host = module_name(frame).partition(".")[0]
        while frame.f_back is not None and module_name(frame.f_back).startswith(host):
            frame = frame.f_back
        self._thread, self._frame_id, self._code = threading.get_ident(), id(frame), frame.f_code

    def is_over(self) -> bool:
        """Return True if the function has returned or raised."""
        frames = walk_frames(sys._current_frames().get(self._thread))
        return not any(id(frame) == self._frame_id and frame.f_code is self._code for frame in frames)
