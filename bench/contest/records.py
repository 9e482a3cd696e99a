"""What the contest found: one cell for each way to run a model's step, beside the plain step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowtide.planner.serialization import Record

Kind = Literal["plain", "peer", "peer's peak", "share", "half", "smallest", "ladder"]
"""Why a cell is there. All but the first two are Lowtide, within a budget:

- `peer's peak`: the measured peak of the peer that `rival` names
- `share`: a share of the plain step's peak
- `half`: parameters, buffers, batch, gradients, and half of the plain step's activations
- `smallest`: the smallest peak that the planner finds
- `ladder`: one of twenty budgets from the smallest to the plain peak
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Record):
    """One way to run the step. What was not run has a `refusal` and nothing that was measured."""

    kind: Kind
    name: str
    rival: str | None = None
    """The name of the peer whose peak is the budget."""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    """By the plan that was made first; the one in force has another if it had to be repaired."""
    peak_bytes: int | None = None
    """Measured. Parameters, buffers and batch are part of it, as they are of a budget."""
    flops: int | None = None
    """Measured: all matrix products, convolutions and attention of one step."""
    seconds: float | None = None
    """Of an undisturbed step (`pieces.py`)."""
    plain_seconds: float | None = None
    """Of a plain one, found from steps that took turns with these."""
    turns: int = 0
    """How many steps of each were timed for that."""
    equal_loss: bool | None = None
    equal_gradients: bool | None = None
    """Whether all gradients are the plain step's (`torch.equal`)."""
    equal_buffers: bool | None = None
    faults: int | None = None
    """Page faults of the last timed step: memory that the process had not touched before."""
    plan_seconds: float | None = None
    """From the profile to the plan."""
    bound_ms: float | None = None
    """No plan for this budget can be predicted to take less extra time."""
    predicted_extra_ms: float | None = None
    predicted_extra_flops: int | None = None
    plan: str = ""
    """What the plan does, in words."""
    repaired: bool = False
    """The first plan was measured over its budget, and another one was made."""
    refusal: str | None = None

    @property
    def time_ratio(self) -> float | None:
        """The step's time over the plain one's."""
        return None if self.seconds is None or self.plain_seconds is None else self.seconds / self.plain_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest(Record):
    """All cells of one model; the first is the plain step."""

    model: str
    description: str
    batch: str
    versions: dict[str, str]
    processor: str
    threads: int
    quick: bool
    """Small models and few turns: for trying the benchmark out, not for its numbers."""
    static_bytes: int
    """Parameters, buffers and batch: what is there when the step begins."""
    gradient_bytes: int
    """Of all parameters together."""
    gradients_at_peak_bytes: int
    """Of those, what the plain step holds at its peak."""
    rehearsal_seconds: float
    wall_seconds: float
    cells: tuple[Cell, ...]

    @property
    def plain(self) -> Cell:
        return self.cells[0]

    @property
    def activation_bytes(self) -> int:
        """The plain step's peak without parameters, buffers, batch and gradients.

        All gradients, as one counts when one adds up what a step needs; at the peak itself most may not be there yet.
        """
        assert self.plain.peak_bytes is not None
        return self.plain.peak_bytes - self.static_bytes - self.gradient_bytes

    @property
    def beyond_static_bytes(self) -> int:
        """The plain step's peak without parameters, buffers, batch and the gradients that are there at the peak."""
        assert self.plain.peak_bytes is not None
        return self.plain.peak_bytes - self.static_bytes - self.gradients_at_peak_bytes

    def of(self, *kinds: Kind) -> tuple[Cell, ...]:
        """The cells of these kinds, in order."""
        return tuple(cell for cell in self.cells if cell.kind in kinds)

    def extra_flops(self, cell: Cell) -> float:
        """FLOPs beyond the plain step's, as a share of those."""
        assert cell.flops is not None
        assert self.plain.flops is not None
        return cell.flops / self.plain.flops - 1

    def duels(self) -> tuple[tuple[Cell, Cell], ...]:
        """Each peer that ran, with Lowtide at that peer's own peak."""
        at = {cell.rival: cell for cell in self.of("peer's peak")}
        return tuple((peer, at[peer.name]) for peer in self.of("peer") if peer.name in at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Record):
    """The whole benchmark."""

    command: str
    contests: tuple[Contest, ...]

    def merged(self, newer: Results) -> Results:
        """These results, with the contests of `newer` in place of those of the same models."""
        new = {contest.model: contest for contest in newer.contests}
        kept = [new.pop(contest.model, contest) for contest in self.contests]
        return Results(command=newer.command, contests=(*kept, *new.values()))
