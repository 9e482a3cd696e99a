"""Labels for the memory blocks of a step: gradient, activation of a module, loss head and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lowtide.memory.events import PHASE, Allocate, Category, EventStream, Free, Label, Mark
from lowtide.profiler.repeated_blocks import repeated_blocks
from lowtide.profiler.trace import Trace
from lowtide.profiler.trace_marks import Exited, Gradients, OptimizerState, Packed

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.engine import Engine
    from lowtide.runtime.saved_values import Handle


class LabelledTrace(Trace):
    """A trace that also records the module of each saved tensor, and marks where the phases of the step begin."""

    def __init__(self, engine: Engine, mark: Callable[[str, object], None]) -> None:
        super().__init__(engine, mark)
        self.modules: list[str] = []
        """Path of the module, for each saved tensor."""
        self.blocks: set[int] = set()
        """Numbers of the calls of repeated blocks."""
        self._repeated = repeated_blocks(engine.model)
        self._phase = ""

    def on_enter(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begins("forward")
        if interceptor.module in self._repeated:
            self.blocks.add(len(self.calls))
        super().on_enter(interceptor, args, kwargs)

    def on_pack(self, handle: Handle, tensor: Tensor) -> None:
        scope = self.engine.here.scope
        assert scope is not None
        self.modules.append(scope.path)
        super().on_pack(handle, tensor)

    def on_read(self, handle: Handle) -> None:
        self._begins("backward")
        super().on_read(handle)

    def _optimizer_begins(self) -> None:
        self._begins("optimizer")
        super()._optimizer_begins()

    def _begins(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._mark_unreferenced()
            self._mark(PHASE, phase)


def labels(stream: EventStream, trace: LabelledTrace) -> dict[int, Label]:
    """Return the label of each block; blocks without a label are temporaries.

    Activations are blocks of saved tensors, and other blocks allocated in forward that are alive when backward begins,
    such as outputs that selective checkpointing keeps.
    """
    label_of: dict[int, Label] = {}
    of_forward: set[int] | None = None
    kept: set[int] = set()
    at: dict[int, Allocate] = {}
    blocks: dict[int, Allocate] = {}
    leaves = [
        i
        for i, event in enumerate(stream)
        if type(event) is Mark and isinstance(event.data, Exited) and event.data.call in trace.blocks
    ]
    last = max(leaves, default=len(stream))
    for i, event in enumerate(stream):
        if type(event) is Allocate:
            at[event.address] = blocks[event.block] = event
            if of_forward is not None:
                of_forward.add(event.block)
        elif type(event) is Free and event.block in blocks:
            at.pop(blocks[event.block].address, None)
        elif type(event) is Mark and event.label == PHASE:
            if event.data == "backward" and of_forward is not None:
                kept |= of_forward & {block.block for block in at.values()}
            of_forward = set() if event.data == "forward" else None
        elif type(event) is Mark:
            match event.data:
                case Packed(slot, where) if where in at:
                    category: Category = "loss head" if i > last else "activations"
                    label_of.setdefault(at[where].block, Label(category, trace.modules[slot], at[where].op))
                case Gradients(addresses, at_entry=False):
                    label_of.update(_labelled("gradients", addresses, at, label_of))
                case OptimizerState(addresses):
                    label_of.update(_labelled("optimizer state", addresses, at, label_of))
    for block in kept - label_of.keys():
        label_of[block] = Label("activations", op=blocks[block].op)
    return label_of


def _labelled(
    category: Category, addresses: Iterable[int], at: Mapping[int, Allocate], known: Mapping[int, Label]
) -> dict[int, Label]:
    """Return labels of `category` for the blocks at `addresses` that have no label in `known`.

    `at` has the live blocks by address.
    """
    blocks = {at[where].block for where in addresses if where in at}
    return dict.fromkeys(blocks - known.keys(), Label(category))
