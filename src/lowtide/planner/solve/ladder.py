"""Find decisions that keep a step's peak within a budget, and never cost more for a larger budget.

Branch and bound (`exact.py`) searches first, and where it leaves a gap to its bound, greedy searches (`greedy.py`)
follow; the cheapest of all simulated choices wins.

**More budget never costs more** time, nor more FLOPs for the same time. A search alone may have bad luck with the
larger of two budgets. So searches run for the rungs of a ladder that is independent of the asked budget: the smallest
peak, the plain peak, and the midpoints between them, halved again and again towards the asked budget for as long as the
costs on both sides of the budget differ. A rung is solved after the rungs on both sides of it. It takes the cheapest
simulated choice that fits it and costs no less than the rung above and no more than the rung below. This choice is the
plan of every budget from its own peak to the rung, and halving goes on below its peak. By induction costs fall from
rung to rung, and a rung's plan is the same whichever budget led to it. A budget between two rungs gets a step of the
staircase between them: choices simulated on the way to these two rungs, each with a larger peak and lower costs than
the choice before. The staircase is the same for every budget between the two rungs. FLOPs alone may rise: the smallest
peaks take replays that are slow and count few FLOPs, and a plan with as few FLOPs would be as slow with much more
memory.

Greedy searches start from the result of the rung above, which has a little more room. They also start from elsewhere
if the limit is near the plain peak.

Deterministic. This order makes plans dearer by a share of up to `NEAR`, or by up to one of `2 ** HALVINGS` parts of the
budget's range, and sometimes loses a lucky result. Not yet: fewer rungs are solved for very deep models, so that
planning stays quick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import Infeasible
from lowtide.planner.objectives import with_work_costs
from lowtide.planner.records import AS_A_WHOLE, CALLED_AGAIN, CHECKPOINTED, LEFT_ALONE, Decisions, Profile, Static
from lowtide.planner.simulate.assignment import DecisionVector
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.exact import BranchAndBound, Bytes, is_rough
from lowtide.planner.solve.greedy import MANY, GreedySearch
from lowtide.planner.solve.milp import is_over
from lowtide.planner.solve.moves import Moves
from lowtide.planner.solve.pareto_pool import Candidate, CostRange, ParetoPool, build_pareto_front
from lowtide.units import format_bytes

Solver = Callable[[Simulator, int], Decisions]
"""Function that returns, for a simulator and a budget in bytes, decisions whose predicted peak is within it. Raises
Infeasible.
"""

HALVINGS = 12
"""Upper limit of the rungs that are solved on the way to one budget."""
NEAR = 0.01
"""Relative difference of costs: no rung is solved between two whose costs differ by less."""
DEPTH = 400
"""Number of storages above which one halving fewer is made, and one fewer still with each doubling."""
GOOD = 1.05
"""Ratio of cost to bound up to which the result of branch and bound is not compared with greedy searches."""
POOR = 1.2
"""Like GOOD, for models on which greedy searches are slow: there searches start only from the rung above."""
NEAR_PLAIN = 0.5
"""Share of the plain peak above which greedy searches also start from an empty choice, a few moves away."""
NOTHING_NEW = 1e-3
"""Relative difference of costs below which a rung adds nothing to the rung below it."""
STUCK = 0.05
"""Relative difference of costs up to which no further rungs are solved above a rung that adds nothing (NOTHING_NEW)."""


NOTHING_SAVED = 0.97
"""Share of the plain step's peak. If the smallest peak is above it, the error for an infeasible budget says that plans
save next to nothing.
"""


LEFT_SHARE = 0.05
"""Share of the smallest peak from which the error for an infeasible budget names memory left by the step before."""

_TEMPORARIES = {
    "before forward": "at its peak, before forward, are temporaries",
    "forward": "at its peak, in forward, are temporaries, of which smaller batches need less",
    "backward": "at its peak, in backward, are temporaries, of which smaller batches need less",
    "after backward": "at its peak, after backward, are temporaries, as of the update",
}


def solve(simulator: Simulator, budget_bytes: int, *, until: float | None = None) -> Decisions:
    """Return decisions whose peak is at most `budget_bytes`, at an extra time that never grows with the budget.

    Results are cached for each simulator, so further budgets take less time. At `until` (by `time.monotonic()`) the
    search ends with the best result so far; the smallest peak is always searched for. Raises Infeasible if no decisions
    fit, with the smallest peak that was found.
    """
    ladder = get_ladder(simulator)
    candidate = ladder.best(budget_bytes - simulator.profile.static.total, until)
    if candidate is None:
        raise infeasible(simulator, budget_bytes, ladder.bottom.choice)
    return simulator.decisions(GreedySearch(ladder.moves).drop_ineffective(candidate.choice))


def minimize_peak(simulator: Simulator) -> Decisions:
    """Return the decisions with the smallest peak that the search finds."""
    ladder = get_ladder(simulator)
    return simulator.decisions(GreedySearch(ladder.moves).drop_ineffective(ladder.bottom.choice))


def infeasible(simulator: Simulator, budget_bytes: int, smallest: DecisionVector) -> Infeasible:
    """Return the error for a budget below the peak of `smallest`, the choice with the smallest peak."""
    prediction, plain = (simulator.predict(decisions) for decisions in (simulator.decisions(smallest), Decisions()))
    step_ms = simulator.profile.step_ms
    # The simulator may have gradients in place, which saves memory, too.
    plain_bytes = max(plain.peak_bytes, simulator.profile.measured_plain_peak_bytes or 0)
    notes, temporaries = [], prediction.parts.get("temporaries", 0)
    told = simulator.profile.notes
    excluded = [note for note in told if LEFT_ALONE in note]
    if temporaries and prediction.peak_bytes > NOTHING_SAVED * plain_bytes and not excluded:
        begun = {at: phase for phase, at in simulator.profile.phases.items() if at <= prediction.peak_position}
        phase = begun[max(begun)] if begun else "before forward"
        notes.append(f"plans save next to nothing of this step: {format_bytes(temporaries)} {_TEMPORARIES[phase]}")
    left_bytes = _count_left_bytes(simulator.profile, prediction.peak_position)
    if left_bytes >= LEFT_SHARE * prediction.peak_bytes:
        notes.append(
            f"{format_bytes(left_bytes)} at its peak are left from the step before, such as an output that a variable "
            "holds until the next forward has returned: `del` it at the end of the step"
        )
    notes += excluded
    notes += [note for note in told if any(words in note for words in (CHECKPOINTED, CALLED_AGAIN, AS_A_WHOLE))]
    return Infeasible(
        budget_bytes=budget_bytes,
        smallest_peak_bytes=prediction.peak_bytes,
        parts={name: size for name, size in prediction.parts.items() if size},
        extra_ratio=prediction.extra_ms / step_ms if step_ms else None,
        notes=notes,
    )


def _count_left_bytes(profile: Profile, position: int) -> int:
    """Return the bytes left by the previous step that are certain to be in memory at `position`."""
    freed_bytes = max(0, profile.gradient_bytes[position] - profile.base_bytes[position])
    return max(0, profile.static.carried_over - freed_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class BudgetStep:
    """The plan for one limit, the choices simulated for it, and the input of `exact.py` for the next limit."""

    limit: int
    candidate: Candidate
    pool: ParetoPool
    omitted_bytes: Bytes


class BudgetLadder:
    """Choices for all limits between the smallest peak and the plain step's peak, searched on demand."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.moves = Moves(simulator)
        self.exact = BranchAndBound(simulator, self.moves)
        self._rungs: dict[int, BudgetStep] = {}
        self._quick = len(self.moves.moves) <= MANY
        """True if greedy searches are fast here."""
        search, low = GreedySearch(self.moves), _find_smallest_candidates(simulator.profile, self._quick)
        for candidate in low:
            search.sweep(candidate.choice)
        peak = low[0].peak
        pruned = search.prune(low[0].choice, peak)
        choice = pruned if search.sweep(pruned).peak == peak else low[0].choice
        self.bottom = Candidate.of(choice, search.sweep(choice))
        """A choice with the smallest peak found without measured times. A search by time may find a smaller peak, but
        no error message names it.
        """
        search.sweep(simulator.keep_everything())
        self.top = min(search.pool.candidates, key=lambda candidate: (candidate.cost, candidate.peak))
        self._first = BudgetStep(self.bottom.peak, self.bottom, search.pool, {})
        self._halvings = HALVINGS
        storages = len(simulator.index.storages.bytes)
        while storages > DEPTH and self._halvings > 1:
            storages, self._halvings = storages // 2, self._halvings - 1

    def best(self, limit: int, until: float | None = None) -> Candidate | None:
        """Return the choice for peaks of at most `limit`, or None if the smallest peak is larger.

        The top of this file describes the search. If `until` ends it, the result is the cheapest choice found so far,
        and a larger limit may get a costlier choice.
        """
        if limit < self.bottom.peak:
            return None
        if limit >= self.top.peak:
            return self.top
        if limit == self.bottom.peak:
            return self.bottom
        low, high, span, path = self.bottom.peak, self.top.peak, CostRange(self.top, self.bottom), [self._first]
        for _ in range(self._halvings):
            middle = (low + high) // 2
            if middle == low or span.is_narrow(NEAR):
                break
            rung = self._rungs.get(middle)
            if rung is None:
                rung = self._solve_step(middle, span, path, until)
                if is_over(until):  # a search that was cut short depends on the clock: cache nothing
                    return self._find_best_so_far(limit, [*path, rung])
                self._rungs[middle] = rung
            path.append(rung)
            if middle <= limit:
                is_stuck = span.is_narrow(STUCK) and CostRange(rung.candidate, span.most).is_narrow(NOTHING_NEW)
                low, span = middle, CostRange(span.least, rung.candidate)
                if is_stuck:
                    break
            elif rung.candidate.peak <= limit:
                return rung.candidate
            else:  # no choice with a peak between the rung's own and the rung is cheaper
                high, span = rung.candidate.peak, CostRange(rung.candidate, span.most)
        steps = build_pareto_front(
            [span.least, *(candidate for rung in path for candidate in rung.pool.candidates)], span
        )
        return [step for step in steps if step.peak <= limit][-1]

    def _find_best_so_far(self, limit: int, path: list[BudgetStep]) -> Candidate:
        """Return the cheapest choice that fits `limit`, among those found for `path` and by one more greedy search."""
        search = GreedySearch(self.moves)
        search.reduce(self.simulator.keep_everything(), limit)
        candidates = (
            candidate for pool in (search.pool, *(rung.pool for rung in path)) for candidate in pool.candidates
        )
        return min(
            (candidate for candidate in candidates if candidate.peak <= limit),
            key=lambda candidate: candidate.cost,
            default=self.bottom,
        )

    def _solve_step(self, limit: int, span: CostRange, path: list[BudgetStep], until: float | None) -> BudgetStep:
        """Find the cheapest choice that fits `limit` at a cost within `span`, beginning from the results in `path`.

        Ends early at `until`.
        """
        search, pools = GreedySearch(self.moves), [rung.pool for rung in path]
        # Where the rows leave out too much for this limit, they may still be good enough for a larger one.
        guides = (rung for rung in reversed(path) if rung.limit > limit or not is_rough(rung.omitted_bytes, rung.limit))
        bound, omitted_bytes = self.exact.search(search, limit, span, next(guides).omitted_bytes, until)
        cheapest = _cheapest(limit, span, [*pools, search.pool])
        enough = GOOD if self._quick else POOR
        if not is_over(until) and self.exact.compute_cost(cheapest) > enough * bound:
            if self._quick:
                begin = [span.least.choice]
                if limit > NEAR_PLAIN * self.top.peak:
                    begin += [self.simulator.keep_everything(), self.moves.recompute_all(expensive=False)]
                starts = [*search.find_fitting_choices(limit, *begin), cheapest.choice]
            else:
                starts = [search.reduce(span.least.choice, limit)]
            for choice in {choice.key: choice for choice in starts}.values():
                if not is_over(until) and search.fits(choice, limit):
                    search.prune(choice, limit)
            cheapest = _cheapest(limit, span, [*pools, search.pool])
        return BudgetStep(limit, cheapest, search.pool, omitted_bytes)


_SMALLEST: list[tuple[Profile, bool, list[Candidate]]] = []
"""Latest arguments and results of `_find_smallest_candidates`. The profiles have work costs and no static memory."""


def _find_smallest_candidates(profile: Profile, is_quick: bool) -> list[Candidate]:
    """Return choices with small peaks, smallest first, from a cache of the last few searches.

    The search uses no measured times, so all rehearsals of a step and all objectives get the same choices. With
    `is_quick`, for models with few moves, it has further starts.
    """
    timeless = replace(with_work_costs(profile), static=Static(), notes=())
    for known, was_quick, candidates in _SMALLEST:
        if was_quick is is_quick and known == timeless:
            return candidates
    candidates = _search_smallest(timeless, is_quick)
    _SMALLEST.append((timeless, is_quick, candidates))
    del _SMALLEST[:-4]
    return candidates


def _search_smallest(profile: Profile, is_quick: bool) -> list[Candidate]:
    search = GreedySearch(Moves(Simulator(profile)))
    smallest = search.search_smallest()
    peak = search.sweep(smallest[0]).peak
    others = search.find_fitting_choices(peak, search.moves.recompute_all(expensive=False)) if is_quick else ()
    for choice in (*smallest, *others):
        search.prune(choice, peak)
    return sorted(search.pool.candidates, key=lambda candidate: (candidate.peak, candidate.cost))


def _cheapest(limit: int, span: CostRange, pools: Sequence[ParetoPool]) -> Candidate:
    """Return the cheapest choice that fits `limit` at a cost within `span`, from `pools` or the two ends of `span`."""
    if span.least.peak <= limit:
        return span.least
    fitting = (pool.best(limit, span) for pool in pools)
    return min(
        (span.most, *(candidate for candidate in fitting if candidate is not None)),
        key=lambda candidate: candidate.cost,
    )


_RECENT: list[BudgetLadder] = []


def get_ladder(simulator: Simulator) -> BudgetLadder:
    """Return the budget ladder of `simulator`. The last few ladders are cached, with all their results."""
    for ladder in _RECENT:
        if ladder.simulator is simulator:
            return ladder
    _RECENT.append(BudgetLadder(simulator))
    del _RECENT[:-4]
    return _RECENT[-1]
