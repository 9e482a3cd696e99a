"""Run a program with a listener on its steps, and explain why the listener could not finish its work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lowtide.errors import LowtideError, RehearsalError
from lowtide.runtime.composite_model import find_name
from lowtide.script.runner import Script
from lowtide.script.step_detector import StepDetector
from lowtide.script.step_listener import StepListener, StopScript
from lowtide.state.watched_process import ONE_AT_A_TIME, alone, end_left_over
from lowtide.utils.frozen_imports import imports_frozen
from lowtide.utils.interrupts import interrupts_delayed

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def watched(
    listener: StepListener, model: nn.Module | None = None, *, when_failed: Callable[[], object] | None = None
) -> Iterator[StepDetector]:
    """Call `listener` for the steps that run within this block; see `StepDetector`.

    Raises LowtideError inside another such block, or while one is active in another thread.
    """
    end_left_over()
    if not alone.acquire(blocking=False):
        raise LowtideError(
            "the training steps of this process are watched already: by lowtide.within around this block or in "
            f"another thread, or by `lowtide run`. {ONE_AT_A_TIME}"
        )
    try:
        with interrupts_delayed(), StepDetector(listener, model, when_failed=when_failed) as detector:
            yield detector
    finally:
        alone.release()


@interrupts_delayed()
def run_watched(script: Script, listener: StepListener) -> int:
    """Run `script` with `listener` on its steps; return its exit code.

    Raises the listener's error, and RehearsalError if the script ended without an error before the listener was done.
    """
    code = 0
    with imports_frozen(), watched(listener) as detector, contextlib.suppress(StopScript):
        code = script.run()
        if code == 0 and detector.failed is None:
            detector.end_last_step()
            listener.finish()
    if isinstance(detector.failed, LowtideError):
        raise detector.failed
    if code == 0 and not listener.done:
        raise RehearsalError(why_not(script.target, detector, listener))
    return code


def why_not(program: str, detector: StepDetector, listener: StepListener) -> str:
    """Explain why the listener could not finish its work in `program`, which has ended."""
    if detector.model is None:
        return detector.unseen.explain(program)
    name = find_name(detector.model)
    if not (detector.updates.n or detector.by_hand.n_updates):
        return (
            f"{program} ended, and no optimizer stepped: {name} was called in training mode, but neither a "
            "torch.optim.Optimizer nor the script's own code updated it.\n  Run at least one step of the training loop "
            "to its end."
        )
    if detector.is_given and not detector.n_steps:
        return (
            f"{program} ended, and the {name} that was given took no step, although a model was updated.\n  Give the "
            "model that the loop trains, or leave model out."
        )
    n_steps = "1 step" if detector.n_steps == 1 else f"{detector.n_steps} steps"
    n_enough = detector.n_steps + listener.n_missing
    return (
        f"{program} ended after {n_steps}, before {name} {listener.awaits}.\n  Train that model for {n_enough} steps."
    )
