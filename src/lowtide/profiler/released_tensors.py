"""Tensors that a frugal audit frees in forward: their recomputes, and the memory that trials in backward may use."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.profiler.audited_step import AuditedStep
    from lowtide.profiler.backward_timings import BackwardTimings
    from lowtide.profiler.replay_check import Witness
    from lowtide.runtime.recompute import Recompute
    from lowtide.runtime.replay import ReplayFrame
    from lowtide.runtime.saved_values import Handle, Recomputation, Value
    from lowtide.runtime.tensor_writers import ReliedOn


class FreedValues:
    """Values that a frugal audit frees in forward and recomputes in backward."""

    def __init__(self, step: AuditedStep, timings: BackwardTimings, relied_on: ReliedOn, witness: Witness) -> None:
        """Begin without freed values of `step`.

        Values with a recompute in `timings` can be freed. `relied_on` copies operands before they are written to, and
        `witness` has checksums of freed tensors.
        """
        self._step, self._timings, self._relied_on, self.witness = step, timings, relied_on, witness
        self._values: weakref.WeakSet[Value] = weakref.WeakSet()
        self._most: int | None = None
        """Bytes of all saved values, counted at the first recompute in backward."""
        self._results: list[Value] = []
        """Results of the block that was freed last."""

    def __contains__(self, value: Value) -> bool:
        return value in self._values

    def add(self, value: Value, maker: Recomputation | None) -> None:
        """Free the tensor of `value`, which `maker` recomputes when it is read.

        Without a `maker`, nothing can recompute the value, so it can be read only once `give_back` has set its tensor.
        """
        value.tensor, value.maker = None, maker
        self._values.add(value)

    def give_back(self, value: Value, tensor: Tensor) -> None:
        """Keep `tensor` as the contents of a freed value, which is saved elsewhere or is an argument of a call."""
        self._values.discard(value)
        value.keep(tensor.detach())

    def add_slot(self, n: int, maker: Recomputation) -> None:
        """Free the value of slot `n`, which `maker` recomputes, and store a checksum of the tensor."""
        self.witness.saved(n, self._step.get_slot_tensor(n))
        self.add(self._step.held[n][0], maker)

    def leave_to(self, frame: ReplayFrame, freed: dict[Value, int]) -> None:
        """Let the replay of a block restore the values in `freed`, each given with its place among the saved
        tensors.
        """
        self._relied_on.add(frame)
        frame.values = {place: weakref.ref(value) for value, place in freed.items()}

    def hold_again(self, frame: ReplayFrame, freed: dict[Value, int]) -> None:
        """Restore the values that a trial of `frame` freed, and keep them, because the call can't be replayed."""
        values = {place: value for value, place in freed.items() if value.maker is frame}
        frame.values = {place: weakref.ref(value) for place, value in values.items()}
        if values:
            frame.visit_saved(lambda place, tensor: self.give_back(values[place], tensor))

    def free(self) -> None:
        """Free again all values that a trial in forward has recomputed."""
        for value in self._values:
            value.tensor = None

    def try_free(self, handle: Handle, tensor: Tensor) -> None:
        """Free a tensor that was just saved, if it can be recomputed from kept tensors without a matrix product."""
        value = handle.value
        draft, maker = self._step.draft(value), self._timings.get_recompute(value)
        is_cheap = bool(draft.recipe) and not draft.flops
        if maker is not None and is_cheap and self._may_free(value, maker):
            self.witness.saved(self._step.slot_of[handle], tensor)
            self._recompute_later(value, maker)

    def add_result(self, value: Value) -> None:
        """Keep a result of a block until `free_results`, while the block's saved tensors are freed."""
        self._results.append(value)

    def free_results(self) -> None:
        """Free results of earlier blocks, because all recomputes from them have been tried.

        A result without a recipe is freed too: no recompute depends on a tensor that neither a slot nor a call holds.
        """
        if not self._results:
            return
        step = self._step
        needed = step.saved.union(slot.value for call in step.calls for slot in call.inputs)
        for value in self._results:
            draft, maker = step.draft(value), self._timings.get_recompute(value)
            if step.index[value] in needed:
                continue
            if maker is not None and draft.recipe:
                self._recompute_later(value, maker)
            elif draft.recipe is None and value.kept:
                self.add(value, None)
        step.passed_through += self._results
        self._results.clear()

    def _recompute_later(self, value: Value, maker: Recompute) -> None:
        """Free a value that `maker` recomputes; parameters that `maker` reads are copied before they are written to."""
        self._relied_on.rely_on(handle.value for handle in maker.operands if handle is not None)
        self.add(value, maker)

    def _may_free(self, value: Value, maker: Recompute) -> bool:
        """Return True if the value can be freed: backward reads it, and holds the operands of `maker` anyway.

        An operand that backward does not read may be overwritten before the recompute, unnoticed. Inside a block that
        will be replayed, an operand may be a freed value itself, because the replay restores both. An argument of the
        block may not be freed: its recompute would replay the previous block, which would need its own argument, and so
        on.
        """
        is_made_here = self._step.is_made_in_freed_block(value)
        operands = [handle.value for handle in maker.operands if handle is not None]
        return (
            value.kept
            and value.readers >= 1
            and not maker.captured_sites
            and all(
                (operand.kept and (operand.leaf or self._step.is_saved(operand)))
                or (is_made_here and operand in self._values)
                for operand in operands
            )
        )

    def has_room_for(self, value: Value, maker: Recompute) -> bool:
        """Return True if a trial of `maker` in backward fits into the memory that the plain step's saved tensors take.

        The value and the operands count if they have been freed. The trial's result does not count, because the
        gradient that backward computes next is as large.
        """
        needed = {value, *(handle.value for handle in maker.operands if handle is not None)}
        step = self._step
        more = sum(step.draft(value).bytes for value in needed if value.tensor is None and value in step.index)
        if not more:
            return True
        saved = [value for value in step.index if step.is_saved(value)]
        held = sum(step.draft(value).bytes for value in saved if value.tensor is not None)
        if self._most is None:
            self._most = sum(step.draft(value).bytes for value in saved)
        return more <= self._most - held
