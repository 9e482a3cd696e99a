"""The audit: every saved tensor of a step is remade once, and every module call that could be replayed is run again.

Each result is compared with the true tensor bit by bit; what differs on this model and device is not used. The same run
counts FLOPs and measures times. Everything is kept meanwhile, so it needs the memory of the plain step; a frugal audit
lets go of each repeated block when it has been audited, and replays it in backward.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.rehearsal.blocks import repeated_blocks, worth_a_replay
from lowtide.rehearsal.drafts import CallDraft, SlotDraft, ValueDraft, describe
from lowtide.rehearsal.trials import CAN_GO_WRONG, Meter, advance, identical
from lowtide.rehearsal.upstream import calls_noting, needs_a_replay
from lowtide.remat import values
from lowtide.remat.actions import DROPOUT_MASK, NUMBERS
from lowtide.remat.engine import Engine, Pass
from lowtide.remat.forward import Scope
from lowtide.remat.layout import producer
from lowtide.remat.remake import CannotRemake, Remake
from lowtide.remat.replay import Frame
from lowtide.remat.seam import Seam
from lowtide.remat.values import Geometry, Handle, Maker, Value, register, registered

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

MIN_BYTES = 4096
"""Smaller saved tensors are always kept."""

SHORT_MS = 20.0
"""What took less is timed once more."""


class Audit(Engine):
    """An engine that keeps everything, tries everything, and is the probe that measures what it tries."""

    def __init__(
        self, model: nn.Module, static: frozenset[int], mark: Callable[[str, object], None], *, frugal: bool = False
    ) -> None:
        super().__init__(model, {})
        self.values: list[ValueDraft] = []
        self.slots: list[SlotDraft] = []
        self.calls: list[CallDraft] = []
        self.reads = 0
        self._static = static
        self._frugal = frugal
        self._blocks = repeated_blocks(model)
        self._around_blocks = frozenset(
            m for m in model.modules() if m not in self._blocks and self._blocks & set(m.modules())
        )
        self._meter = Meter(mark)
        self._index: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._saved: set[int] = set()
        """Values that a slot has had so far; others are arguments of calls, which only a replay would hold."""
        self._open: list[tuple[int, Frame | None]] = []
        self._handles: dict[int, tuple[Value, Geometry | None]] = {}
        self._passed_through: list[Value] = []
        """Values without a slot, so far: made on the way in remakes, or results of calls."""
        self._returned: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The model's calls in this block are audited."""
        self.install()
        values.probe = self
        try:
            yield
        finally:
            values.probe = None
            self.remove()
            self._open.clear()
            self._let_go()

    # --- saved tensors

    def draws(self, scope: Scope) -> bool:
        return True

    def notes(self, scope: Scope) -> bool:
        return True

    def pack(self, now: Pass, tensor: Tensor) -> Handle:
        scope = now.scope
        assert scope is not None
        value, view = self.known(tensor)
        index = self._index[value]
        if not self.values[index].node:
            self.try_mask(index, tensor, scope)
        label = f"{scope.path or type(self.model).__name__}: {describe(tensor, self.values[index].node)}"
        slot = SlotDraft(address=f"{scope.id}:{scope.ordinal}", label=label, value=index, call=self._open[-1][0])
        self._handles[len(self.slots)] = value, view
        self._saved.add(index)
        self.slots.append(slot)
        scope.ordinal += 1
        return Handle(value, view)

    def known(self, tensor: Tensor) -> tuple[Value, Geometry | None]:
        """The kept value of a tensor, audited when it is first seen."""
        base, node, output, view = producer(tensor)
        if node is None:
            value = Value(base.detach())
            if isinstance(base, nn.Parameter):
                value.leaf = id(base)
            self.add(value, base, "")
            return value, view
        there = registered(node, output)
        if there is not None and there in self._index and not isinstance(there.maker, Remake):
            return there, view
        if there is None or there not in self._index:
            value = Value(base.detach(), output=output)
            self.try_recipe(self.add(value, base, node.name()), node, output, base)
        else:  # so far only passed through in the remakes of others
            value = there
            self.compare(self._index[value], value, base)
            value.keep(base.detach())
        register(node, output, value)
        return value, view

    def add(self, value: Value, base: Tensor, node: str) -> int:
        """A new value; 0 bytes for what is there anyway."""
        static = base.untyped_storage().data_ptr() in self._static
        self._index[value] = len(self.values)
        self.values.append(ValueDraft(bytes=0 if static else base.numel() * base.element_size(), node=node))
        return len(self.values) - 1

    def try_recipe(self, index: int, node: Node, output: int, base: Tensor) -> None:
        """Find out whether and at what cost a recipe remakes a value."""
        draft = self.values[index]
        if draft.bytes < MIN_BYTES:
            draft.refused = "too small to gain anything"
            return
        try:
            self.compare(index, self.builder.remake(node, output, base), base)
        except CannotRemake as why:
            draft.refused = str(why)

    def try_mask(self, index: int, tensor: Tensor, scope: Scope) -> None:
        """Find out whether a tensor that no node made is a dropout mask, and can be drawn again."""
        assert scope.draws is not None
        try:
            value = scope.draws.value(tensor)
        except CannotRemake:
            return
        self.compare(index, value, tensor)
        if self.values[index].recipe is not None:
            self.values[index].node = DROPOUT_MASK

    def compare(self, index: int, value: Value, base: Tensor) -> None:
        """Remake `value` and compare it with what it should be."""
        draft, maker = self.values[index], value.maker
        assert isinstance(maker, Remake)
        assert self.scope is not None
        noting = calls_noting(maker)
        if noting - {self.scope.id}:
            draft.refused = "it takes a number that an operator was given in another call than the one that saves it"
            return
        if self._frugal and needs_a_replay(maker):
            draft.refused = "what it is made of is inside a block that is replayed to save memory"
            return
        try:
            with self._meter.flops:
                made = maker.make(value)
        except (RuntimeError, TypeError, ValueError) as error:
            draft.refused = f"its recipe failed: {error}".splitlines()[0]
            return
        draft.bytes = base.numel() * base.element_size()
        spent = self._meter.of(maker)
        draft.needs = self.operands(maker)
        draft.cost_ms, draft.flops, draft.spent = spent.cost_ms, spent.flops, spent.spent
        if any(map(self.only_given, draft.needs)):
            draft.recipe, draft.refused = None, "it is made of an argument of a call that nothing else holds"
        elif identical(made, base):
            draft.recipe = maker.recipe.node
            draft.node += NUMBERS if noting else ""
            del made
            if draft.cost_ms < SHORT_MS:
                maker.make(value)  # in memory that has been touched: the first run may have paid for new pages
                draft.cost_ms = self._meter.of(maker).cost_ms
        else:
            draft.recipe, draft.refused = None, "remaking it gives other bits on this device"

    def only_given(self, index: int) -> bool:
        """Whether a value is there, so far, because it was given to a call, or is made of such a one."""
        draft = self.values[index]
        return index not in self._saved and (draft.recipe is None or any(map(self.only_given, draft.needs)))

    def operands(self, maker: Remake) -> tuple[int, ...]:
        """Indices of a remake's operands, without what is always there; those only passed through are added here."""
        needs = []
        for value in (handle.value for handle in maker.operands if handle is not None):
            if value not in self._index and isinstance(value.maker, Remake):
                upstream = self.operands(value.maker)
                spent = self._meter.of(value.maker)
                self._index[value] = len(self.values)
                self.values.append(replace(spent, needs=upstream, recipe=spent.node))
                self._passed_through.append(value)
            if value in self._index:
                needs.append(self._index[value])
        return tuple(dict.fromkeys(needs))

    # --- module calls

    def entering(self, seam: Seam, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.scope is not None
        parent = self._open[-1][0] if self._open else None
        call = CallDraft(id=self.scope.id, cls=type(seam.module).__name__, parent=parent, first_slot=len(self.slots))
        self.calls.append(call)
        self._open.append((len(self.calls) - 1, None))
        if parent is None:
            call.refused = "it is the whole model"
        elif not worth_a_replay(seam.module):
            call.refused = "what it saves has recipes"
        elif seam.module in self._around_blocks:
            call.refused = "the blocks in it are replayed instead"
        else:
            self._open[-1] = len(self.calls) - 1, Frame(seam, args, kwargs, self.argument)

    def argument(self, tensor: Tensor) -> Handle:
        """Hold an argument of the call that begins, as an input slot of it."""
        assert self.scope is not None
        value, view = self.known(tensor)
        index, call = self._index[value], self.calls[-1]
        label = f"{self.scope.path}: argument {describe(tensor, self.values[index].node)}"
        address = f"{call.id}@{len(call.inputs)}"
        call.inputs.append(SlotDraft(address=address, label=label, value=index, call=len(self.calls) - 1))
        return Handle(value, view)

    def returning(self, seam: Seam, result: Any) -> None:
        self._returned = result

    def leaving(self, seam: Seam) -> None:
        index, frame = self._open.pop()
        returned, self._returned = self._returned, None
        call = self.calls[index]
        call.stop_slot = len(self.slots)
        if frame is not None:
            frame.close()
            call.refused = self.try_replay(call, frame)
            if call.refused is None and seam.module in self._blocks:
                if (advanced := advance(frame, returned, self._meter.flops)) is not None:
                    result, call.advance_ms, call.advance_flops = advanced
                    value, _ = self.known(result)
                    call.gives = self._index[value]
                    self._passed_through.append(value)
                if self._frugal:
                    self.let_go(call, frame)
        if not self._open:
            self._let_go()

    def _let_go(self) -> None:
        """Hold no tensor any longer: backward begins, or the step has failed."""
        self._handles.clear()
        self._passed_through.clear()
        self._meter.forget()

    def try_replay(self, call: CallDraft, frame: Frame) -> str | None:
        """Run a call again and compare all that it saves. The reason why it can't be replayed, or None."""
        packed = range(call.first_slot, call.stop_slot)
        inputs = {slot.value for slot in call.inputs}
        inside = {self.slots[n].value for n in packed} - inputs
        if not any(self.values[value].bytes >= MIN_BYTES for value in inside):
            return "it saves little besides its arguments"
        frame.values = {n - call.first_slot: weakref.ref(self._handles[n][0]) for n in packed}
        began, flops = time.perf_counter(), self._meter.flops.total
        try:
            with self._meter.flops:
                found = frame.catch()
        except CAN_GO_WRONG as error:
            return f"running it again failed: {type(error).__name__}: {error}".splitlines()[0]
        call.cost_ms = (time.perf_counter() - began) * 1000
        call.flops = self._meter.flops.total - flops
        for place, tensor in found.items():
            value, view = self._handles[call.first_slot + place]
            if not identical(tensor, value.get(), view):
                return f"running it again gives other bits for {self.slots[call.first_slot + place].label}"
        return None

    def let_go(self, call: CallDraft, frame: Frame) -> None:
        """Free what an audited block saved: its replay brings it back."""
        inputs = {slot.value for slot in call.inputs}
        mine: dict[Value, int] = {}
        for n in range(call.first_slot, call.stop_slot):
            value, _ = self._handles[n]
            if self._index[value] not in inputs and self.values[self._index[value]].bytes:
                value.tensor, value.maker = None, frame
                mine.setdefault(value, n - call.first_slot)
        frame.values = {place: weakref.ref(value) for value, place in mine.items()}

    # --- the probe

    def packed(self, handle: Handle, tensor: Tensor) -> None:
        """Nothing: `pack` itself takes notes."""

    def reading(self, handle: Handle) -> None:
        self.reads += 1

    def making(self, maker: Maker) -> None:
        self._meter.making()

    def made(self, maker: Maker, outputs: tuple[Tensor, ...]) -> None:
        if isinstance(maker, Remake):
            self._meter.made(maker, outputs[0])
