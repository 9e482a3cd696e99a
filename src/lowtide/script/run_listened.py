"""Runs a script with a crew on its steps, and says in words why the crew could not do its work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from lowtide.errors import LowtideError, RehearsalError
from lowtide.runtime.bypassed_calls import IN_TRANSFORM
from lowtide.script.composite_model import name_of
from lowtide.script.runner import Script
from lowtide.script.step_detector import Steps
from lowtide.script.step_listener import Crew, Enough
from lowtide.utils.interrupts import held_back


@held_back()
def run_watched(script: Script, crew: Crew, *, untrained: Callable[[str], None] | None = None) -> int:
    """Run `script` with `crew` on its steps; gives its exit code.

    Raises what the crew raised, and RehearsalError if the script ended well before the crew was done. But if it trained
    nothing, as with `--help`, `untrained` is told that, if given.
    """
    code = 0
    with Steps(crew) as steps, contextlib.suppress(Enough):
        code = script.run()
        if code == 0 and steps.failed is None:
            steps.ended()
            crew.finish()
    if isinstance(steps.failed, LowtideError):
        raise steps.failed
    elsewhere = steps.in_other_thread or steps.started_processes or steps.in_transform
    nothing = steps.model is None and not steps.n_updates and not elsewhere
    if code == 0 and nothing and not crew.done and untrained is not None:
        untrained(f"{script.target} ended, and {_UNTRAINED}.")
    elif code == 0 and not crew.done:
        raise RehearsalError(_why_not(script, steps, crew))
    return code


_UNTRAINED = "no model was trained: no module with trainable parameters was called in training mode with gradients on"


def _why_not(script: Script, steps: Steps, crew: Crew) -> str:
    ended = f"{script.target} ended"
    if steps.model is None and steps.in_other_thread:
        return (
            f"{ended}; it trains in another thread, where nothing was watched.\n  Let the script call its training "
            "loop in the main thread."
        )
    if steps.model is None and steps.in_transform:
        return f"{ended}; its model was called {IN_TRANSFORM}"
    if steps.model is None and steps.started_processes:
        return (
            f"{ended}; no model was trained in it, but perhaps in processes that it started (torch.multiprocessing, "
            "spawn), where nothing was watched.\n"
            "  Call lowtide.fit(model, step, batch) in the function that each process runs, or have the processes "
            "started from outside: torchrun --no-python --nproc-per-node N lowtide run ... SCRIPT."
        )
    if steps.model is None and steps.in_backward_only:
        return (
            f"{ended}; the whole model is inside of a reentrant checkpoint, which runs it without gradients first.\n"
            "  Say use_reentrant=False there, or do without: plans keep what pays."
        )
    if steps.model is None:
        return (
            f"{ended}, and {_UNTRAINED}.\n"
            "  Call model.train() before the training loop, and let Lowtide run the script that trains."
        )
    name = name_of(steps.model)
    if not steps.n_updates and steps.by_hand.n_updates:
        return (
            f"{ended}, and no torch.optim.Optimizer stepped: something else updates {name}, so where a step ends is "
            "not known.\n  Derive what updates it from torch.optim.Optimizer, or call lowtide.fit(model, step, batch) "
            "in the script."
        )
    if not steps.n_updates:
        return (
            f"{ended}, and no optimizer stepped: {name} was called in training mode, but no torch.optim.Optimizer "
            "updated it.\n  Let the script run at least one step of its training loop to the end."
        )
    return (
        f"{ended} after {steps.n_updates} optimizer steps, before {name} {crew.awaits}.\n"
        "  Let the script train that model for longer."
    )
