"""Make a plan for each range of batch sizes: small batches take no extra time, and the largest keep to the budget.

Sizes lie on a straight line from a small batch to the large one. The first bucket ends with the largest batch that fits
without any plan; the sizes beyond it are cut into BUCKETS parts of about the same width. Each part gets the plan of its
largest size, which holds for all smaller sizes, too. (Mimose, arXiv 2209.02478, plans for each input size in the same
manner, from sizes that it has seen.)

Cost: two rehearsals, and for each bucket a plan and its proof; a third rehearsal and more only if the two sizes do
different work, or a plan's proof fails. Not yet: sizes that vary in several directions. A batch that is small in only
one direction gets the plan for its size in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.api.shape_buckets.interpolate import PREDICTED, alike, between
from lowtide.api.shape_buckets.shape_range import Calls, Range, interpolate_shapes
from lowtide.errors import Infeasible, LowtideError, OverBudget, RehearsalError
from lowtide.planner.planning import plain_peak_bytes
from lowtide.planner.records import Plan, Profile
from lowtide.profiler import rehearse
from lowtide.runtime.call_shapes import Shapes
from lowtide.runtime.fingerprint import fingerprint
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.utils.amounts import parse_budget

if TYPE_CHECKING:
    from torch import nn

    from lowtide.api.verify import Verdict

BUCKETS = 3
"""Number of buckets for sizes that do not fit without a plan."""

FitOne = Callable[[Any, int, Profile], tuple[Plan, "Verdict"]]
"""Function that fits one batch into the budget and returns its plan and the proof. Raises Infeasible or OverBudget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A range of batch sizes that share one plan."""

    size: str
    """The size of the bucket's largest batch, in words."""
    shapes: dict[str, Shapes]
    """Upper bounds of the shapes passed to calls of the model and its parts, by module path."""
    profile: Profile
    plan: Plan
    verdict: Verdict


def make_buckets(
    model: nn.Module,
    step: Callable[[Any], Any],
    sizes: Range,
    budget: int | str,
    fit_one: FitOne,
    *,
    optimizer: Optimizers = None,
    large: Profile,
) -> list[Bucket]:
    """Divide a range of batch sizes into buckets, and fit each; return the buckets with their plans, smallest first.

    `large` is the profile of the largest batch, `fit_one` plans and verifies one batch. Raises Infeasible, OverBudget
    or RehearsalError as `fit` does.
    """
    in_place = large.allows_in_place
    small = _rehearse_smallest(model, step, sizes, optimizer, in_place)
    budget_bytes = parse_budget(budget, plain_peak_bytes=plain_peak_bytes(large))
    few, many = (_record_shapes(model, step, sizes.batch(share), optimizer) for share in (0.0, 1.0))
    same_work = alike(small, large)
    buckets: list[Bucket] = []
    for end in reversed(
        _find_bucket_ends(sizes, small, large, budget_bytes)
    ):  # largest first: its errors rule out the others
        share = sizes.share(end)
        batch = sizes.batch(share)
        known = large if share == 1 else small if share == 0 else None
        if known is None and same_work:
            known = between(small, large, share, fingerprint(model, batch))
        profile = known or _rehearse(model, step, batch, optimizer, in_place)
        try:
            plan, verdict = fit_one(batch, budget_bytes, profile)
            holds = not verdict.drifted
        except (Infeasible, OverBudget):
            if PREDICTED not in profile.notes:
                raise
            holds = False
        if not holds and PREDICTED in profile.notes:
            profile = _rehearse(model, step, batch, optimizer, in_place)
            plan, verdict = fit_one(batch, budget_bytes, profile)
        shapes = interpolate_shapes(few, many, share)
        buckets.append(Bucket(size=sizes.say(share), shapes=shapes, profile=profile, plan=plan, verdict=verdict))
    return buckets[::-1]


def _rehearse(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, optimizer: Optimizers, in_place: bool
) -> Profile:
    """Rehearse a batch. Compiled blocks are replayed as a whole, because a plan inside them is for one size only."""
    return rehearse(model, step, batch, optimizer=optimizer, in_place=in_place, inside_blocks=False)


def _rehearse_smallest(
    model: nn.Module, step: Callable[[Any], Any], sizes: Range, optimizer: Optimizers, in_place: bool
) -> Profile:
    """Rehearse the smallest batch of `sizes`. Raises RehearsalError if the step fails on it."""
    try:
        return _rehearse(model, step, sizes.batch(0.0), optimizer, in_place)
    except Exception as error:
        if isinstance(error, LowtideError) or is_out_of_memory(error):
            raise
        raise RehearsalError(
            f"the step fails on a smaller batch, of {sizes.say(0.0)} instead of {sizes.say(1.0)}: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}\n  "
            "Give a smaller batch on which the step runs: shapes=batch."
        ) from error


def _find_bucket_ends(sizes: Range, small: Profile, large: Profile, budget_bytes: int) -> list[int]:
    """Return the number of the largest size of each bucket; the smallest size of the range has number 0.

    The first bucket holds the sizes that need no plan: their plain peak, interpolated linearly, is within the budget.
    The other buckets divide the rest evenly.
    """
    least, most = plain_peak_bytes(small), plain_peak_bytes(large)
    if most <= budget_bytes:
        return [sizes.steps]
    free = 0 if least >= budget_bytes else int(sizes.steps * (budget_bytes - least) / (most - least))
    beyond = sizes.steps - free
    return sorted({free, *(free + -(-beyond * n // BUCKETS) for n in range(1, BUCKETS + 1))})


def _record_shapes(
    model: nn.Module, step: Callable[[Any], Any], batch: Any, optimizer: Optimizers
) -> dict[str, Shapes]:
    """Run the step, and return the shapes passed to calls of the model and its parts, by module path."""
    calls = Calls(model)
    with StepSnapshot(model, batch, optimizer, step):
        calls.install()
        try:
            step(batch)
        finally:
            calls.remove()
    return calls.shapes
