"""One step's memory with names on it: each block is a gradient, an activation of some module, of the loss head..."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide.errors import StalePlan
from lowtide.identity import fingerprint, place_of, tensors_in
from lowtide.memory.events import PHASE, Allocate, Category, EventStream, Free, Label, Mark, Timeline
from lowtide.memory.measuring import recorder_for
from lowtide.rehearsal.blocks import repeated_blocks
from lowtide.rehearsal.checks import check
from lowtide.rehearsal.trace import Trace, address
from lowtide.rehearsal.unchanged import Unchanged
from lowtide.remat.planned import Planned

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowtide.planner.records import Plan
    from lowtide.remat.engine import Engine
    from lowtide.remat.seam import Seam
    from lowtide.remat.values import Handle


def timeline(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    plan: Plan | None = None,
    optimizer: Optimizer | None = None,
) -> Timeline:
    """What is in memory after each allocation of one `step(batch)`, by category and module, without or under a plan.

    Bytes are over entry: parameters and whatever else exists before the step are not in it. The step is run twice, the
    second time is shown (when the optimizer has its state), and afterwards everything is as it was. Raises
    RehearsalError for a step that can't be rehearsed, StalePlan for a plan of another model.
    """
    check(model, step, batch)
    if plan is not None:
        found = replace(fingerprint(model, batch), batch=plan.fingerprint.batch)
        if differences := plan.fingerprint.differences(found):
            raise StalePlan(f"this plan is not for this {type(model).__name__}.", differences=differences)
    with Unchanged(model, batch, optimizer, step) as unchanged:
        step(batch)
        with recorder_for(place_of(model)) as recorder:
            names = _Names(Planned(model, plan), recorder.mark)
            with names.running():
                step(batch)
            state = [t for o in unchanged.optimizers for entry in o.state.values() for t in tensors_in(entry)]
            recorder.mark("optimizer state", tuple(address(t) for t in state))
    return Timeline(recorder.stream, _labels(recorder.stream, names))


class _Names(Trace):
    """A trace that also knows in which module each tensor was saved, and says where the phases of the step begin."""

    def __init__(self, engine: Engine, mark: Callable[[str, object], None]) -> None:
        super().__init__(engine, mark)
        self.modules: list[str] = []
        """Path of the module, for each saved tensor."""
        self.blocks: set[int] = set()
        """Numbers of the calls of repeated blocks."""
        self._repeated = repeated_blocks(engine.model)
        self._phase = ""

    def entering(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begins("forward")
        if seam.module in self._repeated:
            self.blocks.add(self.n_calls)
        super().entering(seam, args, kwargs)

    def packed(self, handle: Handle, tensor: Tensor) -> None:
        assert self.engine.scope is not None
        self.modules.append(self.engine.scope.path)
        super().packed(handle, tensor)

    def reading(self, handle: Handle) -> None:
        self._begins("backward")
        super().reading(handle)

    def _optimizer(self, what: str) -> None:
        self._begins("optimizer")
        super()._optimizer(what)

    def _begins(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.mark(PHASE, phase)


def _labels(stream: EventStream, names: _Names) -> dict[int, Label]:
    """What each block turned out to be; blocks without a label are temporaries."""
    labels: dict[int, Label] = {}
    at: dict[int, Allocate] = {}
    blocks: dict[int, Allocate] = {}
    leaves = [i for i, e in enumerate(stream) if type(e) is Mark and e.label == "leave" and e.data in names.blocks]
    last = max(leaves, default=len(stream))
    for i, event in enumerate(stream):
        if type(event) is Allocate:
            at[event.address] = blocks[event.block] = event
        elif type(event) is Free and event.block in blocks:
            at.pop(blocks[event.block].address, None)
        elif type(event) is Mark:
            match event.label, event.data:
                case "pack", (int(slot), int(where)) if where in at:
                    category: Category = "loss head" if i > last else "activations"
                    labels.setdefault(at[where].block, Label(category, names.modules[slot], at[where].op))
                case ("gradients" | "optimizer state") as category, tuple(addresses):
                    for where in addresses:
                        if where in at:
                            labels.setdefault(at[where].block, Label(category))
    return labels
