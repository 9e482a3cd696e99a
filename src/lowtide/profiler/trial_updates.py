"""Trial updates after the step, by optimizers of the model that do not step inside it.

A budget covers the memory of such updates: the optimizer state, which the first update creates, and temporary memory.
So a rehearsal lets these optimizers update the model after the step, and undoes the updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.optim import list_parameters
from lowtide._torch.patching import this_thread_only
from lowtide.errors import summarize
from lowtide.memory.measure import make_recorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.report.text_table import listed
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.live_optimizers import Optimizers, find_optimizers, state_bytes
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.units import format_bytes
from lowtide.utils.progress import advance

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.planner.records import Profile

NO_OPTIMIZER: Final = (
    "no optimizer has the model's parameters yet: the update by a later one, and its state, come on top of the budget. "
    "Create it before, or pass optimizer="
)


@dataclass(frozen=True, slots=True)
class Update:
    """Memory of an update by optimizers that have not stepped so far."""

    names: tuple[str, ...]
    state_bytes: int
    """Bytes of the state that the first update creates."""
    transient_bytes: int
    untried: dict[str, str]
    """Reason why an update could not be tried, by class of the optimizer."""

    @classmethod
    def tried(cls, model: nn.Module, stepped: Sequence[Optimizer]) -> Update | None:
        """Measure an update by the optimizers of `model` that are not in `stepped`; return None if there are none.

        The optimizers update `model` twice; afterwards the model is restored. Missing gradients are zeros.
        """
        optimizers = [o for o in find_optimizers(model, stepped) if all(o is not known for known in stepped)]
        if not optimizers:
            return None
        place = find_device(model)
        with (
            StepSnapshot(model, step=lambda _: None) as unchanged,
            Updates(unchanged, model, only=optimizers) as updates,
        ):
            for parameter in (p for p in model.parameters() if p.requires_grad and p.grad is None):
                parameter.grad = torch.zeros_like(parameter)
            before_bytes = state_bytes(optimizers, place)
            updates.run(None)
            made_bytes = state_bytes(optimizers, place) - before_bytes
            with make_recorder(place) as recorder:
                updates.run(None)
        names = tuple(type(optimizer).__name__ for optimizer in updates.following)
        return cls(names, made_bytes, Timeline(recorder.stream).peak_bytes, updates.untried)

    def counted(self, profile: Profile) -> Profile:
        """Return `profile` with the memory of the update added, and notes on it.

        Optimizer state is counted from the step's beginning on. Gradients and temporary memory are counted at the last
        position, because the update follows the step.
        """
        base, most_bytes = list(profile.base_bytes), max(profile.gradient_bytes) + self.transient_bytes
        level, in_place = base[-1], []
        base[-1] = max(level, most_bytes)
        for group in profile.in_place:
            below = level - group.saved_bytes[-1]
            saved_bytes = max(level, most_bytes) - max(below, most_bytes)
            in_place.append(replace(group, saved_bytes=(*group.saved_bytes[:-1], saved_bytes)))
            level = below
        static = replace(profile.static, optimizer=profile.static.optimizer + self.state_bytes)
        notes = (*profile.notes, *self._notes())
        return replace(profile, static=static, base_bytes=tuple(base), in_place=tuple(in_place), notes=notes)

    def _notes(self) -> tuple[str, ...]:
        """Return notes on updates whose memory is counted, and on updates that could not be tried."""
        if not self.names:
            return _note_untried(self.untried)
        made = (
            f"updates by {listed(self.names)} are yet to come, and counted: {format_bytes(self.state_bytes)} of state"
        )
        return (made, *_note_untried(self.untried))


class Updates:
    """Runner of rehearsed steps, each followed by the updates of optimizers that the step itself does not call.

    Used inside a `StepSnapshot`, which undoes the updates.
    """

    def __init__(
        self,
        unchanged: StepSnapshot,
        model: nn.Module,
        named: Optimizers = None,
        *,
        only: Iterable[Optimizer] | None = None,
    ) -> None:
        self._unchanged, self._model = unchanged, model
        self.following = find_optimizers(model, named) if only is None else [*only]
        """Optimizers that update the model after the step if they have not done so inside it."""
        self._updated = {id(p) for optimizer in self.following for p in list_parameters(optimizer)}
        self._stepped: set[int] = set()
        self._followed: list[Optimizer] = []
        self._has_stepped = False
        self.untried: dict[str, str] = {}
        """Reason why an update could not be tried, by class of the optimizer."""
        for optimizer in [o for o in self.following if type(o).__module__.startswith("torch.distributed.")]:
            self._leave_out(optimizer, "it sends to other processes")

    def __enter__(self) -> Self:
        hook = this_thread_only(self._steps, lambda tensor: id(tensor) in self._updated)
        self._hook = register_optimizer_step_pre_hook(hook)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def run(self, batch: Any) -> Any:
        """Run one step, then the update by each optimizer that did not step inside it."""
        result = self.step(batch)
        self.follow()
        advance()
        return result

    def step(self, batch: Any) -> Any:
        """Run one step, without the updates that follow it."""
        self._stepped.clear()
        return self._unchanged.run(batch)

    def follow(self) -> None:
        """Call `step()` of each optimizer that the last training step has not called."""
        for optimizer in [o for o in self.following if id(o) not in self._stepped and self._can_update(o)]:
            self._followed.append(optimizer)
            try:
                optimizer.step()
            except Exception as error:  # a custom optimizer, for example with a closure or an update in two halves
                if is_out_of_memory(error):
                    raise
                self._leave_out(optimizer, summarize(error))

    def undo(self) -> None:
        """Restore parameters that `follow` updated, because the loop may clip gradients before its own update."""
        self._unchanged.restore_contents({id(p) for optimizer in self._followed for p in list_parameters(optimizer)})
        self._followed.clear()

    def notes(self) -> tuple[str, ...]:
        """Return notes for a profile on updates whose memory is unknown."""
        if not (self.following or self._has_stepped or self.untried):
            return (NO_OPTIMIZER,) if any(p.requires_grad for p in self._model.parameters()) else ()
        return _note_untried(self.untried)

    def _can_update(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer has gradients, and a gradient scaler would not skip the update."""
        gradients = [p.grad for p in list_parameters(optimizer) if p.grad is not None]
        return bool(gradients) and not (self._unchanged.scales and any(not torch.isfinite(g).all() for g in gradients))

    def _leave_out(self, optimizer: Optimizer, why: str) -> None:
        self.untried[type(optimizer).__name__] = why
        self.following.remove(optimizer)

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        self._has_stepped = True


def _note_untried(untried: dict[str, str]) -> tuple[str, ...]:
    return tuple(
        f"an update by {name} could not be rehearsed ({why}): its state comes on top of the budget"
        for name, why in untried.items()
    )
