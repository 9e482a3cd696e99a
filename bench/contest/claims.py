"""Claims about Lowtide, and whether the results of the contest support them. Pure functions of the records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from contest.records import Cell, Contest, Results
from lowtide.units import format_bytes

EVERY_BLOCK = "checkpoint every block"
"""The peer that Lowtide is claimed to beat in time, too."""
OURS = ("peer's peak", "share", "half", "smallest", "ladder")
MOST_EXTRA_TIME = {"resnet": 0.15}
"""Claimed limit of extra time at half of the activations, as a share of the plain step's time, by model."""
MOST_EXTRA_TIME_ELSE = 0.08
PREDICTED_WITHIN = 0.01


def get_extra_time_limit(model: str) -> float:
    """Return the claimed limit of extra time for halving a model's activations, as a share of the plain step's time."""
    return MOST_EXTRA_TIME.get(model, MOST_EXTRA_TIME_ELSE)


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim in words, True if it held (None: not measured), the numbers found, and each case against it."""

    text: str
    held: bool | None
    found: str
    against: tuple[str, ...] = ()


def claims(results: Results) -> tuple[Claim, ...]:
    """Check all claims against `results`; an empty tuple without results."""
    contests = results.contests
    return tuple(claim(contests) for claim in _CLAIMS if contests)


def _check_peers_peaks(contests: tuple[Contest, ...]) -> Claim:
    """Check that at every peer's peak, on every model, Lowtide needs no more bytes and no more FLOPs."""
    against, n = [], 0
    for contest, peer, mine in _duels(contests):
        n += 1
        if (why := loses(contest, peer, mine)) is not None:
            against.append(f"{contest.model}, {peer.name}: {why}")
    return Claim(
        "At every peer's own peak, Lowtide needs no more bytes and no more FLOPs",
        not against,
        f"{n - len(against)} of {n} points",
        tuple(against),
    )


def loses(contest: Contest, peer: Cell, mine: Cell) -> str | None:
    """Explain why Lowtide (`mine`) loses to a peer at that peer's peak; None if it does not lose."""
    if mine.refusal is not None:
        return mine.refusal
    assert mine.peak_bytes is not None
    assert peer.peak_bytes is not None
    assert mine.flops is not None
    assert peer.flops is not None
    if mine.peak_bytes > peer.peak_bytes:
        return f"the peak is {mine.peak_bytes - peer.peak_bytes} bytes above"
    if mine.flops > peer.flops:
        flops = f"FLOPs {contest.extra_flops(mine):+.2%}, and the peer has {contest.extra_flops(peer):+.2%}"
        unused = format_bytes(peer.peak_bytes - mine.peak_bytes)
        return f"{flops}; {unused} of its peak unused{_describe_less_time(peer, mine)}"
    return None


def _describe_less_time(peer: Cell, mine: Cell) -> str:
    """Return the times if Lowtide takes less time in spite of more FLOPs, else an empty string."""
    if mine.time_ratio is None or peer.time_ratio is None or mine.time_ratio >= peer.time_ratio:
        return ""
    return f"; in less time, {mine.time_ratio:.2f} x instead of {peer.time_ratio:.2f} x"


def _check_half_the_flops(contests: tuple[Contest, ...]) -> Claim:
    """Check that Lowtide's extra FLOPs are, in the median, at most half of a peer's, over all peers that have extra
    FLOPs.
    """
    shares = [
        contest.extra_flops(mine) / contest.extra_flops(peer) if mine.refusal is None else math.inf
        for contest, peer, mine in _duels(contests)
        if contest.extra_flops(peer) > 0
    ]
    return Claim(
        "At the peers' peaks, Lowtide's extra FLOPs are at most half of the peers' in the median",
        median(shares) <= 0.5 if shares else None,
        f"{median(shares):.0%} in the median of the {len(shares)} points where the peer has extra FLOPs"
        if shares
        else "",
    )


def _check_every_block(contests: tuple[Contest, ...]) -> Claim:
    """Check bytes, FLOPs and time at the peak of checkpointing every block, the usual remedy."""
    found, against = [], []
    untimed = False
    for contest, peer, mine in _duels(contests):
        if peer.name != EVERY_BLOCK:
            continue
        why = loses(contest, peer, mine)
        flops = f"FLOPs {contest.extra_flops(mine):+.1%} (checkpoint {contest.extra_flops(peer):+.1%})"
        if why is None and mine.flops == peer.flops:
            why = f"{flops}, equally many"
        times = ""
        if why is None and mine.time_ratio is not None and peer.time_ratio is not None:
            times = f"time {mine.time_ratio:.2f} x ({peer.time_ratio:.2f} x)"
            why = times if mine.time_ratio >= peer.time_ratio else None
        if why is not None:
            against.append(f"{contest.model}: {why}")
        else:
            untimed |= not times
            found.append(", ".join(filter(None, (f"{contest.model} {flops}", times))))
    return Claim(
        "Lowtide reaches the peak of checkpointing every block with fewer extra FLOPs and less time",
        None if untimed and not against else not against,
        "; ".join(found) or "on no model",
        tuple(against),
    )


def _check_half_the_activations(contests: tuple[Contest, ...]) -> Claim:
    found, against = [], []
    untimed = False
    for contest, mine in _ours(contests):
        if mine.kind != "half":
            continue
        most = get_extra_time_limit(contest.model)
        ratio = mine.time_ratio
        untimed |= ratio is None and mine.refusal is None
        said = f"{ratio - 1:+.1%}" if ratio is not None else mine.refusal or "not timed"
        found.append(f"{contest.model} {said}")
        if mine.refusal is not None or (ratio is not None and ratio - 1 > most):
            against.append(f"{contest.model}: {said}; at most {most:.0%} is claimed")
    return Claim(
        "Halving the activations costs at most 8 % time, 15 % on ResNet",
        None if untimed and not against else not against,
        ", ".join(found),
        tuple(against),
    )


def _predicted(contests: tuple[Contest, ...]) -> Claim:
    cells = [(c, m, compute_peak_error(m)) for c, m in _ours(contests) if m.peak_bytes is not None and not m.repaired]
    against = [f"{c.model}, {m.name}: {off:+.2%}" for c, m, off in cells if abs(off) > PREDICTED_WITHIN]
    most = max((abs(off) for _, _, off in cells), default=0.0)
    found = f"{most:.2%} at most in {len(cells)} cells"
    return Claim("The predicted peak is within 1 % of the measured one", not against, found, tuple(against))


def compute_peak_error(cell: Cell) -> float:
    """Return the relative error of the predicted peak: predicted less measured bytes, over measured bytes."""
    assert cell.predicted_peak_bytes is not None
    assert cell.peak_bytes is not None
    return cell.predicted_peak_bytes / cell.peak_bytes - 1


def _budgets(contests: tuple[Contest, ...]) -> Claim:
    cells = [(c, m) for c, m in _ours(contests) if m.peak_bytes is not None]
    over = [(c, m) for c, m in cells if (m.peak_bytes or 0) > (m.budget_bytes or 0)]
    repaired = sum(m.repaired for _, m in cells)
    against = [f"{c.model}, {m.name}: {(m.peak_bytes or 0) - (m.budget_bytes or 0)} bytes" for c, m in over]
    found = f"{len(over)} of {len(cells)} cells over; {repaired} needed a second plan"
    return Claim("No measured peak is above its budget", not against, found, tuple(against))


def _check_same_bits(contests: tuple[Contest, ...]) -> Claim:
    cells = [(c, m) for c, m in _ours(contests) if m.peak_bytes is not None]
    against = [f"{c.model}, {m.name}" for c, m in cells if not is_equal(m)]
    found = f"in {len(cells) - len(against)} of {len(cells)} cells"
    return Claim("Loss, gradients and buffers equal the plain step's bit for bit", not against, found, tuple(against))


def is_equal(cell: Cell) -> bool:
    """Return True if loss, gradients and buffers have the plain step's bits."""
    return bool(cell.equal_loss and cell.equal_gradients and cell.equal_buffers)


def _monotone(contests: tuple[Contest, ...]) -> Claim:
    against: list[str] = []
    found = []
    for contest in contests:
        rungs = sorted(contest.of("ladder"), key=lambda cell: cell.budget_bytes or 0)
        ran = [cell for cell in rungs if cell.peak_bytes is not None]
        against += [f"{contest.model}, {cell.name}: {cell.refusal}" for cell in rungs if cell.peak_bytes is None]
        if ran:
            found.append(f"{contest.model}: {len(ran)} budgets")
        for less, more in pairwise(ran):
            if (more.peak_bytes or 0) < (less.peak_bytes or 0):
                against.append(f"{contest.model}, {more.name}: a lower peak than with less budget")
            if (more.flops or 0) > (less.flops or 0):
                extra = f"{contest.extra_flops(more):+.2%} after {contest.extra_flops(less):+.2%}"
                against.append(f"{contest.model}, {more.name}: more FLOPs than with less budget, {extra}")
    text = "From the smallest to the plain peak, with twenty budgets, measured peaks rise and measured FLOPs fall"
    return Claim(text, not against if found or against else None, ", ".join(found), tuple(against))


_CLAIMS: tuple[Callable[[tuple[Contest, ...]], Claim], ...] = (
    _check_peers_peaks,
    _check_half_the_flops,
    _check_every_block,
    _check_half_the_activations,
    _predicted,
    _budgets,
    _check_same_bits,
    _monotone,
)


def _duels(contests: tuple[Contest, ...]) -> Iterator[tuple[Contest, Cell, Cell]]:
    for contest in contests:
        for peer, mine in contest.duels():
            yield contest, peer, mine


def _ours(contests: tuple[Contest, ...]) -> Iterator[tuple[Contest, Cell]]:
    for contest in contests:
        for cell in contest.cells:
            if cell.kind in OURS:
                yield contest, cell
