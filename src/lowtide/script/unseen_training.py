"""Kinds of training that the detector of steps can't see, and their explanations."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide._torch.compiled_code import n_compiled
from lowtide.runtime.bypassed_calls import IN_TRANSFORM
from lowtide.script.plan_monitor import IN_PROCESSES

_UNTRAINED = "no model was trained: no module with trainable parameters was called in training mode with gradients on"


@dataclass(slots=True)
class UnseenTraining:
    """Signs, observed in a program, of kinds of training in which no steps can be detected."""

    in_other_thread: bool = False
    """True if a model was trained in a thread that had started before the block."""
    in_backward_only: bool = False
    """True if a model was called with gradients enabled in backward passes, and without gradients elsewhere."""
    in_transform: bool = False
    """True if a model was called in transforms of torch.func."""
    in_processes: bool = False
    """True if the program started processes."""
    n_compiled_before: int = field(default_factory=n_compiled)
    """Number of graphs that torch.compile had compiled when the block began: functions compiled before it are not
    watched.
    """

    def explain(self, program: str) -> str:
        """Return a message that says why no trained model was found in `program`, which has ended."""
        ended = f"{program} ended"
        if self.in_other_thread:
            return (
                f"{ended}; it trains in a thread that was there before, where nothing was watched.\n  Start that "
                "thread later, or call the training loop in the same thread."
            )
        if self.in_transform:
            return f"{ended}; its model was called {IN_TRANSFORM}"
        if self.in_processes:
            return (
                f"{ended}; no model was trained in it, but perhaps in processes that it started "
                f"(torch.multiprocessing, spawn), where nothing was watched.\n  {IN_PROCESSES}"
            )
        if self.in_backward_only:
            return (
                f"{ended}; the whole model is inside a reentrant checkpoint, which runs it without gradients first.\n"
                "  Say use_reentrant=False there, or do without: plans keep what pays."
            )
        if n_compiled() > self.n_compiled_before:
            return (
                f"{ended}, and {_UNTRAINED}. A function that torch.compile made before was perhaps called.\n"
                "  Call torch.compile inside the block, or compile the model instead: torch.compile(model)."
            )
        return (
            f"{ended}, and {_UNTRAINED}.\n"
            "  Call model.train() before the training loop, and let Lowtide run what trains."
        )
