"""`lowtide.explain_oom`: adds an explanation to an out-of-memory exception, as a note."""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import replace
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Literal

from lowtide.diagnostics.oom.advice import advise
from lowtide.diagnostics.oom.explanation import Explanation, explain
from lowtide.diagnostics.oom.live_facts import collect_facts
from lowtide.errors import LowtideError
from lowtide.planner import find_smallest_peak
from lowtide.planner.planning import get_simulator
from lowtide.planner.records import Decisions
from lowtide.profiler import rehearse
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Step = Callable[[Any], Any]

_RESERVED_BYTES = 16 << 20
"""Address space reserved for the explanation, in case the process reached its own limit. Untouched, it takes no memory.
"""


class explain_oom(AbstractContextManager[None, Literal[False]], ContextDecorator):
    """Add a note to an out-of-memory error that leaves the block: the cause in numbers, and the remedy.

    The exception itself propagates. Other exceptions are not touched, and a block that does not fail costs nothing, so
    it may enclose a whole training run. The class is also a decorator. Tracebacks and `logging` print the note.

    Args:
        model: The model; found in the traceback if not given.
        optimizer: The optimizer; found in the traceback if not given.
        step: The training step, as for `fit`: the note then names a plan that fits. The step is rehearsed at that
            moment, which takes several steps' time and clears the local variables of the failed frames: a debugger
            finds none.
        batch: The batch to rehearse `step` with.

    Raises:
        LowtideError: If `step` is given without `model`.

    Example:
        >>> import torch, lowtide
        >>> try:
        ...     with lowtide.explain_oom():
        ...         torch.empty(1 << 50)
        ... except RuntimeError as error:
        ...     print(error.__notes__[0].strip().splitlines()[0])
        lowtide: out of memory: a single tensor is too large [huge-tensor]
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        optimizer: Optimizer | None = None,
        step: Step | None = None,
        batch: Any = None,
    ) -> None:
        if step is not None and model is None:
            raise LowtideError("explain_oom was given a step but no model: pass the model that the step trains, too.")
        self._model, self._optimizer, self._step, self._batch = model, optimizer, step, batch
        self._reserve = _reserve_address_space()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> Literal[False]:
        if error is None or not is_out_of_memory(error):
            return False
        if self._reserve is not None:
            self._reserve.close()
        try:
            note = self._make_note(error)
        except Exception as failure:  # the user's own error matters, whatever failed here
            note = f"the error could not be explained: {type(failure).__name__}: {failure}"
        error.add_note(f"\nlowtide: {note}")
        self._reserve = _reserve_address_space()
        return False

    def _make_note(self, error: BaseException) -> str:
        text = f"{type(error).__name__}: {error}"
        explanation = explain(text, collect_facts(error, self._model, self._optimizer))
        if explanation is None:
            return "out of memory, but Lowtide does not know this message. Please report it."
        if self._step is None:
            return str(explanation)
        clear_frames(error.__traceback__)
        gc.collect()
        return str(self._add_plan(explanation))

    def _add_plan(self, explanation: Explanation) -> Explanation:
        assert self._model is not None
        assert self._step is not None
        try:
            profile = rehearse(self._model, self._step, self._batch, optimizer=self._optimizer)
        except Exception as failure:
            if not (isinstance(failure, LowtideError) or is_out_of_memory(failure)):
                raise
            why = str(failure).partition("\n")[0]
            notes = (f"the step could not be rehearsed to find a plan: {why}",)
            return replace(explanation, facts=replace(explanation.facts, notes=notes))
        _, least = find_smallest_peak(profile)
        plain = get_simulator(profile).predict(Decisions())
        extra = f", {100 * least.extra_ms / profile.step_ms:+.0f} % time" if profile.step_ms else ""
        facts = replace(
            explanation.facts,
            smallest_peak_bytes=least.peak_bytes,
            plain_peak_bytes=plain.peak_bytes,
            static_bytes=profile.static.total,
            notes=(
                f"rehearsed peak: {format_bytes(plain.peak_bytes)} without a plan, "
                f"{format_bytes(least.peak_bytes, round_up=True)} under the plan with the smallest peak{extra}; "
                f"{format_bytes(profile.static.total)} are in use before the step begins",
            ),
        )
        return replace(explanation, facts=facts, actions=advise(explanation.message, facts, explanation.cause))


def _reserve_address_space() -> mmap.mmap | None:
    """Reserve address space to free when memory runs out, so that the error can be explained; None if it fails."""
    with contextlib.suppress(OSError, ValueError, MemoryError):
        return mmap.mmap(-1, _RESERVED_BYTES)
    return None
