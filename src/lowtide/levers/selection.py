"""Select the levers of a plan for a budget: the requested levers are tried one after the other, the cheapest first.

A lever is tried by a rehearsal of the step with that lever and the levers selected before, so its effect is measured.
It is selected only if it lowers the peak of the step, or else the smallest peak of any plan. A lever that does more
work than the plain step must also save time if a plan fits without that lever: its measured cost must be less than the
time of the recomputes and replays that it saves. Micro-batches are tried only if no plan fits otherwise. The selection
ends when the step fits without any recompute or replay. The same profiles, with the same costs, give the same levers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lowtide._torch.device_timing import now_ms
from lowtide.errors import Infeasible, LowtideError, summarize
from lowtide.levers import DEFAULT, LEVERS, enable
from lowtide.levers.lever import Lever, LeverNotApplicable, Settings, StepContext
from lowtide.levers.micro_batches import find_piece_counts
from lowtide.levers.released_fields import Refused
from lowtide.planner.planning import find_smallest_peak, plain_peak_bytes, plan, predict_in_place_peak
from lowtide.planner.records import AppliedLever, Prediction, Profile
from lowtide.profiler import rehearse
from lowtide.profiler.preconditions import check_can_rehearse
from lowtide.report.text_table import format_added_time
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.live_optimizers import is_of
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot
from lowtide.units import format_bytes, format_time

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


TIMED = 3
"""Number of steps that are timed with and without a lever that costs time; the quickest of each counts."""
SMALL = 0.01
"""Least share of the peak that a default lever must save to be used, because the step can then read fewer outputs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The profile of the step with the selected levers on, and the reasons why other levers are not used."""

    profile: Profile
    plain: Prediction
    """Memory and time of the step without any lever or plan."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """For each requested lever that is not used, the reason."""


def choose(site: StepContext, profile: Profile, plain: Prediction, budget_bytes: int, names: Collection[str]) -> Choice:
    """Choose levers for a budget: those in `names` that lower the peak, and cost less time than they save.

    `profile` describes the step without levers, and `plain` its memory and time. The step is run a few times for each
    lever that is tried; all state is restored.
    """
    best, notes = LeverTrial(profile, budget_bytes), dict[str, str]()
    for lever in (lever for lever in LEVERS.values() if lever.name in names):
        try:
            if best.is_free or (lever.is_last_resort and best.has_plan):
                raise LeverNotApplicable("the step fits without it")
            best = (
                _search_number(site, best, lever)
                if lever.takes_number
                else _rehearse_with(site, best, lever, lever.settings(site))
            )
        except LeverNotApplicable as why:
            if lever.name not in DEFAULT:
                notes[lever.name] = f"lever {lever.name!r} is not used: {why}"
    return Choice(best.profile, plain, notes)


class LeverTrial:
    """Profile of a step rehearsed with levers on, and the peaks that plans made from it can reach for a budget."""

    def __init__(self, profile: Profile, budget_bytes: int) -> None:
        self.profile, self.budget_bytes = profile, budget_bytes
        self.peak_bytes = plain_peak_bytes(profile)

    @property
    def is_free(self) -> bool:
        """Return True if the step fits at no cost, without any recompute or replay."""
        return min(self.peak_bytes, predict_in_place_peak(self.profile)) <= self.budget_bytes

    @property
    def has_plan(self) -> bool:
        """Return True if a plan for the budget exists."""
        return self.is_free or self.smallest_bytes <= self.budget_bytes

    @property
    def extra_ms(self) -> float:
        """Extra time in milliseconds of a step under the plan for the budget, levers included."""
        return plan(self.profile, self.budget_bytes).predicted.extra_ms

    @functools.cached_property
    def smallest_bytes(self) -> int:
        """Smallest peak, in bytes, that any plan made from the profile reaches."""
        return find_smallest_peak(self.profile)[1].peak_bytes


def _rehearse_with(site: StepContext, before: LeverTrial, lever: Lever, settings: Settings) -> LeverTrial:
    """Rehearse the step with `lever` added to the levers of `before`; return the new profile as a LeverTrial.

    Raises LeverNotApplicable if the lever can't be enabled, lowers no peak, or costs more time than it saves.
    """
    applied = AppliedLever(
        name=lever.name, what=lever.put_in_words(settings), exact=lever.exact, settings=dict(settings)
    )
    profile = rehearse_with_levers(site, (*before.profile.levers, applied))
    more_ms = 0.0 if lever.is_free(settings) else _measure_extra_ms(site, before.profile.levers, profile.levers)

    def with_saving(saved_bytes: int) -> LeverTrial:
        levers = (*before.profile.levers, replace(applied, bytes=saved_bytes, extra_ms=more_ms))
        return LeverTrial(replace(profile, levers=levers, step_ms=before.profile.step_ms), before.budget_bytes)

    after = with_saving(max(0, before.peak_bytes - LeverTrial(profile, 0).peak_bytes))
    if before.peak_bytes <= after.peak_bytes:
        after = with_saving(max(0, before.smallest_bytes - after.smallest_bytes))
    if not after.profile.levers[-1].bytes or (before.has_plan and not after.has_plan):
        raise LeverNotApplicable("no peak is lower with it")
    if lever.name in DEFAULT and after.profile.levers[-1].bytes < SMALL * before.peak_bytes:
        raise LeverNotApplicable("it saves too little")
    if more_ms and before.has_plan and (saved_ms := before.extra_ms - after.extra_ms + more_ms) <= more_ms:
        raise LeverNotApplicable(explain_not_paying(more_ms, saved_ms, before.profile.step_ms))
    return after


def explain_not_paying(more_ms: float, saved_ms: float, step_ms: float) -> str:
    """Explain why a lever that adds `more_ms` to a step of `step_ms` is not used; `saved_ms` may be negative."""
    saved = format_time(saved_ms) if saved_ms > 0 else "nothing"
    added = format_added_time(more_ms, step_ms).removeprefix("+")
    return f"it adds {added}, and saves {saved} of recomputes and replays"


def _measure_extra_ms(site: StepContext, before: tuple[AppliedLever, ...], after: tuple[AppliedLever, ...]) -> float:
    """Measure the extra milliseconds of a step with the levers `after` over a step with the levers `before`.

    Returns 0 if either step does not fit in memory.
    """
    times_ms = []
    for levers in (before, after):
        snapshot = StepSnapshot(site.model, site.batch, site.optimizer, site.step)
        with snapshot, enable(site.model, levers, site.optimizer):
            try:
                times_ms.append(min(_time_step(site, snapshot) for _ in range(TIMED)))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return 0.0
    return max(0.0, times_ms[1] - times_ms[0])


def _time_step(site: StepContext, snapshot: StepSnapshot) -> float:
    device = find_device(site.model)
    began = now_ms(device)
    snapshot.run(site.batch)
    return now_ms(device) - began


def _search_number(site: StepContext, before: LeverTrial, lever: Lever) -> LeverTrial:
    """Search for the fewest pieces of the batch with which a plan fits the budget; return the trial with that number.

    If none fits, return the trial with the most pieces. The search is binary: with more pieces the peak is lower.
    Raises LeverNotApplicable if the lever can't be enabled, lowers no peak, or costs more time than it saves.
    """
    candidates = list(find_piece_counts(site))
    if not candidates:
        raise LeverNotApplicable("the batch has a single row")
    best = _rehearse_with(site, before, lever, {"n": candidates.pop()})
    if not best.has_plan:
        return best
    while candidates:
        middle = len(candidates) // 2
        try:
            tried = _rehearse_with(site, before, lever, {"n": candidates[middle]})
        except LeverNotApplicable:  # more pieces are needed
            candidates = candidates[middle + 1 :]
            continue
        candidates = candidates[:middle] if tried.has_plan else candidates[middle + 1 :]
        best = tried if tried.has_plan else best
    return best


def rehearse_with_levers(site: StepContext, levers: tuple[AppliedLever, ...]) -> Profile:
    """Rehearse the step with `levers` on. Raises LeverNotApplicable, with the reason, if a lever must not be on."""
    with enable(site.model, levers, site.optimizer) as on:
        try:
            profile = rehearse(
                site.model,
                site.step,
                site.batch,
                optimizer=site.optimizer,
                in_place=site.in_place,
                inside_blocks=site.inside_blocks,
            )
        except Refused as error:
            raise LeverNotApplicable(
                f"the step reads more than the loss: {str(error).partition(' was freed')[0]}"
            ) from error
        except LowtideError as error:
            raise LeverNotApplicable(str(error).removesuffix(".")) from error
        except Exception as error:  # the step ran without the lever
            raise LeverNotApplicable(f"the step fails with it: {summarize(error)}") from error
        on.check()
    return replace(profile, levers=levers)


def suggest_levers(
    site: StepContext, names: Collection[str], unused: Collection[str], error: Infeasible
) -> tuple[str, ...]:
    """Suggest levers beyond `names` that may help if no plan fits.

    Each suggestion also has the levers in `names`, except those in `unused`.
    """
    if site.optimizer is None:
        try:
            site = replace(site, optimizer=find_optimizer(site.model, site.step, site.batch))
        except Exception as failed:
            if not is_out_of_memory(failed):
                raise
    suggestions = []
    for lever in LEVERS.values():
        if (
            lever.name not in names
            and (saved := lever.estimate_saving(site, error.parts))
            and _is_applicable(site, lever)
        ):
            lever_names = tuple(name for name in LEVERS if (name in names and name not in unused) or name == lever.name)
            suggestions.append(f"levers={lever_names!r} (up to {format_bytes(saved)} less)")
    return tuple(suggestions)


def _is_applicable(site: StepContext, lever: Lever) -> bool:
    """Return False if `lever.settings` raises LeverNotApplicable; True otherwise, also if it runs out of memory."""
    try:
        lever.settings(site)
    except LeverNotApplicable:
        return False
    except Exception as failed:
        if not is_out_of_memory(failed):
            raise
    return True


def find_optimizer(model: nn.Module, step: Callable[[Any], Any], batch: Any) -> Optimizer | None:
    """Find the one optimizer that steps on parameters of `model`; None if there are none or several.

    Runs `step(batch)` once, and restores all state.
    """
    check_can_rehearse(model, step, batch)
    with StepSnapshot(model, batch, step=step) as snapshot:
        step(batch)
        optimizers = [optimizer for optimizer in snapshot.optimizers if is_of(model, optimizer)]
    return optimizers[0] if len(optimizers) == 1 else None
