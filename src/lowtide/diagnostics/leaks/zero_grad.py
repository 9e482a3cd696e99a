"""What calls of `zero_grad` tell."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lowtide.diagnostics.leaks.call_log import Call
from lowtide.diagnostics.leaks.call_site import Place
from lowtide.diagnostics.leaks.finding_log import Ledger
from lowtide.diagnostics.leaks.live_tensors import storage_bytes
from lowtide.diagnostics.leaks.rules.stale_gradients import SET_TO_ZERO, ZERO_GRAD_LATE


class Gradients:
    """Notices gradients that are zeroed too late, or not given back."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._late: tuple[int, int, Place, Call] | None = None

    def zeroed(
        self,
        parameters: Iterable[Tensor],
        set_to_none: bool,
        waiting: Call | None,
        step: int,
        least_bytes: int,
        place: Place,
    ) -> None:
        """`zero_grad` is about to run; `waiting` is the last forward, if backward has not come to it yet."""
        held_bytes = sum(storage_bytes(p.grad) for p in parameters if p.grad is not None)
        if held_bytes < least_bytes:
            return
        if not set_to_none:
            self._ledger.say(
                SET_TO_ZERO,
                str(place),
                held_bytes=held_bytes,
                step=step,
                text=f"the gradients that {place} sets to zero",
                made=place,
            )
        elif waiting is not None:
            self._late = (held_bytes, step, place, waiting)

    def backward_ends(self) -> None:
        """A backward pass is through: if gradients were zeroed between its forward and it, that was late."""
        late, self._late = self._late, None
        if late is None or not late[-1].backwards:  # else a graph that is kept, as of a validation
            return
        held_bytes, step, place, call = late
        self._ledger.say(
            ZERO_GRAD_LATE,
            str(place),
            held_bytes=held_bytes,
            step=step,
            text=f"the gradients of the step before, until zero_grad at {place}",
            made=call.place,
        )
