"""Findings from calls of `zero_grad`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lowtide.diagnostics.leaks.call_log import Call
from lowtide.diagnostics.leaks.call_site import Place
from lowtide.diagnostics.leaks.finding_log import FindingLog
from lowtide.diagnostics.leaks.live_tensors import storage_bytes


class ZeroGradChecks:
    """Detector of gradients that are zeroed too late, or never freed."""

    def __init__(self, log: FindingLog) -> None:
        self._finding_log = log
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
        """Check the gradients of `parameters` before `zero_grad`, called at `place`, resets them.

        `waiting` is the last model call if no backward pass has reached its graph yet, else None.
        """
        held_bytes = sum(storage_bytes(p.grad) for p in parameters if p.grad is not None)
        if held_bytes < least_bytes:
            return
        if not set_to_none:
            self._finding_log.record(
                "LT018",
                str(place),
                held_bytes=held_bytes,
                step=step,
                text=f"the gradients that {place} sets to zero",
                made_at=place,
            )
        elif waiting is not None:
            self._late = (held_bytes, step, place, waiting)

    def backward_ends(self) -> None:
        """Log a finding if gradients were reset between the forward and this backward pass."""
        late, self._late = self._late, None
        if late is None or not late[-1].backwards:  # no pass reached the forward, such as that of a validation
            return
        held_bytes, step, place, call = late
        self._finding_log.record(
            "LT017",
            str(place),
            held_bytes=held_bytes,
            step=step,
            text=f"the gradients of the step before, until zero_grad at {place}",
            made_at=call.place,
        )
