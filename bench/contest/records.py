"""Records of the contest's results: one cell for each way to run a model's step, compared with the plain step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowtide.planner.serialization import Record

Kind = Literal["plain", "peer", "peer's peak", "share", "half", "smallest", "ladder"]
"""Kind of a cell. All but the first two are Lowtide's, within a budget:

- `peer's peak`: the measured peak of the peer that `rival` names
- `share`: a share of the plain step's peak
- `half`: parameters, buffers, batch, gradients, and half of the plain step's activations
- `smallest`: the smallest peak that the planner finds
- `ladder`: one of twenty budgets from the smallest to the plain peak
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Record):
    """One way to run the step, with its measurements. A way that was not run has a `refusal` and no measurements."""

    kind: Kind
    name: str
    rival: str | None = None
    """Name of the peer whose peak is the budget."""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    """Peak that the first plan predicted; a repaired plan in force has another prediction."""
    peak_bytes: int | None = None
    """Measured peak. It includes parameters, buffers and batch, as a budget does."""
    flops: int | None = None
    """Measured FLOPs: all matrix products, convolutions and attention of one step."""
    seconds: float | None = None
    """Time of an undisturbed step (`pieces.py`)."""
    plain_seconds: float | None = None
    """Time of an undisturbed plain step, from steps that took turns with this cell's."""
    turns: int = 0
    """Number of timed steps, of this cell and of the plain step each."""
    equal_loss: bool | None = None
    equal_gradients: bool | None = None
    """True if all gradients equal the plain step's (`torch.equal`)."""
    equal_buffers: bool | None = None
    faults: int | None = None
    """Page faults of the last timed step: first touches of memory by the process."""
    plan_seconds: float | None = None
    """Time of planning, from the profile to the plan."""
    bound_ms: float | None = None
    """Lower bound on the predicted extra time of any plan for this budget."""
    predicted_extra_ms: float | None = None
    predicted_extra_flops: int | None = None
    plan: str = ""
    """The plan's decisions, in words."""
    repaired: bool = False
    """True if the first plan was measured over its budget, and another plan was made."""
    refusal: str | None = None

    @property
    def time_ratio(self) -> float | None:
        """Time of the step over the plain step's; None if not timed."""
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
    """True for small models and few turns: to try the benchmark out, not for its numbers."""
    static_bytes: int
    """Bytes of parameters, buffers and batch, which exist when the step begins."""
    gradient_bytes: int
    """Bytes of the gradients of all parameters together."""
    gradients_at_peak_bytes: int
    """Bytes of the gradients that exist at the plain step's peak."""
    rehearsal_seconds: float
    wall_seconds: float
    cells: tuple[Cell, ...]

    @property
    def plain(self) -> Cell:
        return self.cells[0]

    @property
    def activation_bytes(self) -> int:
        """The plain step's peak without parameters, buffers, batch and all gradients.

        All gradients are subtracted, although most may not exist yet at the peak.
        """
        assert self.plain.peak_bytes is not None
        return self.plain.peak_bytes - self.static_bytes - self.gradient_bytes

    @property
    def beyond_static_bytes(self) -> int:
        """The plain step's peak without parameters, buffers, batch and the gradients that exist at the peak."""
        assert self.plain.peak_bytes is not None
        return self.plain.peak_bytes - self.static_bytes - self.gradients_at_peak_bytes

    def of(self, *kinds: Kind) -> tuple[Cell, ...]:
        """Return the cells of these kinds, in order."""
        return tuple(cell for cell in self.cells if cell.kind in kinds)

    def extra_flops(self, cell: Cell) -> float:
        """Return a cell's FLOPs beyond the plain step's, as a share of the plain step's."""
        assert cell.flops is not None
        assert self.plain.flops is not None
        return cell.flops / self.plain.flops - 1

    def duels(self) -> tuple[tuple[Cell, Cell], ...]:
        """Return pairs of cells: each peer that ran, and Lowtide at that peer's peak."""
        at = {cell.rival: cell for cell in self.of("peer's peak")}
        return tuple((peer, at[peer.name]) for peer in self.of("peer") if peer.name in at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Record):
    """All results of the benchmark."""

    command: str
    contests: tuple[Contest, ...]

    def merged(self, newer: Results) -> Results:
        """Return these results, with the contests of `newer` in place of contests of the same models."""
        new = {contest.model: contest for contest in newer.contests}
        kept = [new.pop(contest.model, contest) for contest in self.contests]
        return Results(command=newer.command, contests=(*kept, *new.values()))
