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
    """A `lowtide.within` block that one callback enters and another leaves.

    A loop that is ended by an exception may never make the second callback. The block is then left when training begins
    again, when another block begins, or by `leave`.
    """

    def __init__(self, new_run: Callable[..., Run]) -> None:
        new_run()  # raises here if the budget is invalid
        self._new_run = new_run
        self.run: Run | None = None
        self._is_open = False

    def begin(self, model: nn.Module) -> None:
        """Enter a `lowtide.within` block for `model`, which is trained by the function that has called the callback."""
        self.leave()
        self.run = self._new_run(model=model)
        self._loop = _Loop()
        self.run.__enter__()
        self._is_open = True
        left_over.append(self._leave_if_over)

    def end(self) -> None:
        """Restore the model when training is over. An error of the plan that the loop has caught is raised again."""
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
        """Return the plan's numbers (`Run.metrics`) for the logs of the loop; empty before there is a plan."""
        return {} if self.run is None else self.run.metrics()

    def _close(self) -> None:
        self._is_open = False
        forget_left_over(self._leave_if_over)

    def _leave_if_over(self) -> None:
        if self._loop.is_over():
            self.leave()


class BudgetCallback:
    """Base class of callbacks for other packages: it takes the arguments of `lowtide.within` and holds the block."""

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
    """Frame of the running function of another package that contains the training loop and calls the callbacks."""

    def __init__(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and module_name(frame).startswith("lowtide."):
            frame = frame.f_back
        host = module_name(frame).partition(".")[0]
        while frame.f_back is not None and module_name(frame.f_back).startswith(host):
            frame = frame.f_back
        self._thread, self._frame_id, self._code = threading.get_ident(), id(frame), frame.f_code

    def is_over(self) -> bool:
        """Return True if the loop's function has returned, or was left by an exception."""
        frames = walk_frames(sys._current_frames().get(self._thread))
        return not any(id(frame) == self._frame_id and frame.f_code is self._code for frame in frames)
