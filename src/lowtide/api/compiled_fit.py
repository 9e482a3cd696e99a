"""Fit compiled code into a budget: measure a few plans, because forecasts of their peaks are uncertain, and compare
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

from lowtide.api.differing_bits import REFUSED, find_differing_addresses, with_kept
from lowtide.api.plan_attempts import list_differences, plan_by_forecast, plan_for, prove, with_choice, with_excess
from lowtide.api.verify import Verdict, compare_with_plain, measure_scheduled_peak
from lowtide.errors import Infeasible, RehearsalError
from lowtide.levers.lever import StepContext
from lowtide.levers.selection import Choice
from lowtide.planner.planning import (
    find_smallest_plan,
    forecast_peak,
    recompute_arithmetic,
    recompute_products,
    with_peak,
)
from lowtide.planner.records import Decisions, Plan, Profile
from lowtide.report.text_table import listed
from lowtide.runtime.fingerprint import find_device
from lowtide.units import format_bytes
from lowtide.utils.amounts import BudgetFor

FORECAST = "before it was compiled"
"""Beginning of the note on the forecast of a compiled plan's peak."""
SCHEDULED = 4
"""Largest number of plans for compiled code that are measured without compiling kernels."""
COMPILED_REPAIRS = 3
"""Largest number of compiled plans that are tried for a budget."""
UNUSED = 0.02
"""Share of a budget that a compiled plan may leave unused before a cheaper plan is tried."""
CLOSE = 0.02
"""If a measured peak exceeds the budget by at most this share of it, plans with larger forecasts are tried, too."""


def fit_compiled(site: StepContext, choice: Choice, plan: Plan, budget_for: BudgetFor) -> tuple[Plan, Verdict]:
    """Measure a few plans for compiled code, `plan` first; return the cheapest plan within the budget, and its proof.

    On a CPU, plans are first measured without compiling kernels, which is quick, and only the best plan is compiled. If
    the step's results then differ in bits from the plain step's, a search finds the recomputed values that change them,
    and further plans keep these values. Raises Infeasible, with the smallest measured peak, if no plan fits, and
    RehearsalError if bits differ under every plan.
    """
    plan, kept = _measure_without_kernels(site, choice, replace(plan, budget_for=budget_for)), tuple[str, ...]()
    while True:
        best, proofs = _compile_and_measure(site, choice, plan)
        last, verdict = proofs[-1]
        if verdict.identical or (best is not None and best.predicted.peak_bytes <= plan.budget_bytes):
            break
        if kept or not last.recompute:
            raise RehearsalError(_explain_compiled_difference(site, last))
        kept = find_differing_addresses(tuple(last.recompute), partial(_is_identical, site, last))
        choice = replace(choice, profile=with_kept(choice.profile, kept))
        try:
            plan = replace(plan_for(choice, plan.budget_bytes, plan.budget_bytes, offload=False), budget_for=budget_for)
            plan = _measure_without_kernels(site, choice, plan)
        except Infeasible as why:
            raise RehearsalError(_explain_compiled_difference(site, last, why.smallest_peak_bytes)) from why
    assert best is not None  # bits were those of the plain step
    if best.predicted.peak_bytes > plan.budget_bytes:
        raise build_compiled_infeasible(choice, best, f"plans that were compiled and measured: {len(proofs)}")
    if len(proofs) > 1:
        best = replace(best, notes=(*best.notes, f"{len(proofs)} plans were compiled and measured"))
    if kept:
        best = replace(best, notes=(*best.notes, f"kept: {listed(kept)} ({REFUSED})"))
    return best, next(proof for tried, proof in proofs if tried.decisions == best.decisions)


def _compile_and_measure(
    site: StepContext, choice: Choice, plan: Plan
) -> tuple[Plan | None, list[tuple[Plan, Verdict]]]:
    """Compile and measure a few plans, `plan` first; return the best plan, and every compiled plan with its verdict.

    The best plan is None if results differ in bits from the plain step's under every plan.
    """
    proofs: list[tuple[Plan, Verdict]] = []

    def peak_of(tried: Plan) -> int | None:
        verdict = prove(site, tried)
        proofs.append((tried, verdict))
        return verdict.measured_peak_bytes if verdict.identical else None

    _, best = find_cheapest_within(choice, plan, peak_of, COMPILED_REPAIRS)
    return best, proofs


def _measure_without_kernels(site: StepContext, choice: Choice, plan: Plan) -> Plan:
    """Measure a few plans, `plan` first, without compiling kernels, and return the cheapest within the budget.

    This works only on a CPU and for a budget of requested bytes; otherwise `plan` is returned. Raises Infeasible if no
    plan is within the budget.
    """
    if plan.decisions == Decisions() or plan.budget_for != "requested" or find_device(site.model).type != "cpu":
        return plan
    peak_of = partial(measure_scheduled_peak, site.model, site.step, site.batch, optimizer=site.optimizer)
    n_scheduled, best = find_cheapest_within(choice, plan, peak_of, SCHEDULED, tries_one_kind=True)
    if best is not None and best.predicted.peak_bytes > plan.budget_bytes:
        raise build_compiled_infeasible(
            choice, best, f"plans that were scheduled by inductor and measured: {n_scheduled}"
        )
    return best or plan


def _is_identical(site: StepContext, plan: Plan, addresses: Collection[str]) -> bool:
    """Return True if the step has the plain step's bits when the plan recomputes only the values at `addresses`."""
    return prove(site, replace(plan, recompute={at: plan.recompute[at] for at in addresses})).identical


def find_cheapest_within(
    choice: Choice,
    plan: Plan,
    peak_of: Callable[[Plan], int | None],
    most: int,
    *,
    tries_one_kind: bool = False,
) -> tuple[int, Plan | None]:
    """Measure at most `most` plans; return how many were tried, and the cheapest plan within the budget.

    If no plan is within the budget, the plan with the lowest measured peak is returned; None if no plan can be used.

    Args:
        choice: The profile, and the levers.
        plan: The first plan. Each further plan is made from the forecast, corrected by the excess of the plan before.
            If all earlier plans are over the budget, the last plan is the one with the smallest forecast.
        peak_of: Function that measures a plan's peak; it returns None for a plan that can't be used.
        most: Largest number of plans to try.
        tries_one_kind: True to try two plans whatever is forecast for them: the plan that recomputes arithmetic alone
            if the best plan leaves much of the budget unused and no cheaper plan is forecast to fit, and the plan that
            recomputes products alone if the plan with the smallest forecast is over the budget.
    """
    budget_bytes, tried, best = plan.budget_bytes, list[Decisions](), None
    while True:
        peak_bytes = peak_of(plan)
        tried.append(plan.decisions)
        if peak_bytes is None:
            break
        measured = as_measured(plan, peak_bytes)
        if best is None or _rank(measured) < _rank(best):
            best = measured
        unused = 1 - peak_bytes / budget_bytes
        if len(tried) == most or 0 <= unused <= UNUSED or (unused >= 0 and plan.budget_for == "reserved"):
            break
        candidates = [*_propose_plans(choice.profile, plan, peak_bytes, best, is_last=len(tried) == most - 1)]
        if tries_one_kind and best.predicted.peak_bytes <= budget_bytes:
            candidates.append(recompute_arithmetic(choice.profile))
        elif tries_one_kind and find_smallest_plan(choice.profile).decisions in tried:
            candidates.insert(0, recompute_products(choice.profile))
        following = next((candidate for candidate in candidates if candidate.decisions not in tried), None)
        if following is None or _rank(best) < (False, following.predicted.extra_ms):
            break
        plan = replace(with_choice(choice, following, budget_bytes), budget_for=plan.budget_for)
    return len(tried), best


def _propose_plans(profile: Profile, plan: Plan, peak_bytes: int, best: Plan, *, is_last: bool) -> Iterator[Plan]:
    """Yield plans to measure next, after `plan` was measured at `peak_bytes`; `best` is the best plan measured so far.

    With `is_last`, only one more plan can be measured: if all plans so far are over the budget, it must be the plan
    with the smallest peak.
    """
    budget_bytes, forecast_bytes = plan.budget_bytes, forecast_peak(profile, plan)
    is_over = best.predicted.peak_bytes > budget_bytes
    if is_over and is_last:
        yield find_smallest_plan(profile)
    yield _plan_or_find_smallest(with_excess(profile, peak_bytes - forecast_bytes), budget_bytes)
    if not is_over:
        return
    if peak_bytes > forecast_bytes:  # forecasts of other plans may be off by less
        yield _plan_or_find_smallest(profile, (forecast_bytes + peak_bytes) // 2)
    if best.predicted.peak_bytes <= (1 + CLOSE) * budget_bytes:
        for share in (CLOSE / 2, CLOSE):
            yield _plan_or_find_smallest(profile, int(forecast_bytes * (1 + share)))
    yield find_smallest_plan(profile)


def _plan_or_find_smallest(profile: Profile, aim_bytes: int) -> Plan:
    """Return a plan whose forecast peak is at most `aim_bytes`, or the plan with the smallest peak if there is none."""
    try:
        return plan_by_forecast(profile, aim_bytes)
    except Infeasible:
        return find_smallest_plan(profile)


def _rank(measured: Plan) -> tuple[bool, float]:
    """Return a sort key for measured plans: plans within the budget first, by extra time; then the rest, by peak."""
    peak_bytes = measured.predicted.peak_bytes
    is_over = peak_bytes > measured.budget_bytes
    return is_over, peak_bytes if is_over else measured.predicted.extra_ms


def as_measured(plan: Plan, peak_bytes: int) -> Plan:
    """Return a compiled plan with its measured peak as prediction; a note says how far off the forecast was."""
    if plan.predicted == plan.plain and peak_bytes <= plan.budget_bytes:  # nothing is compiled for the plan
        return plan
    apart = peak_bytes / plan.predicted.peak_bytes - 1
    plan = replace(plan, notes=tuple(note for note in plan.notes if not note.startswith(FORECAST)))
    note = f"{FORECAST}, {format_bytes(plan.predicted.peak_bytes)} were forecast: {apart:+.1%} measured"
    return replace(plan, predicted=with_peak(plan.predicted, peak_bytes), notes=(*plan.notes, note))


def build_compiled_infeasible(choice: Choice, lowest: Plan, tried: str) -> Infeasible:
    """Build the error for a budget that is exceeded by the measured peaks of all tried plans for compiled code.

    `lowest` is the plan with the smallest measured peak; `tried` is a note that says how many plans were tried.
    """
    return Infeasible(
        budget_bytes=lowest.budget_bytes,
        smallest_peak_bytes=lowest.predicted.peak_bytes,
        parts=lowest.predicted.parts,
        notes=(tried, *choice.profile.notes),
    )


def _explain_compiled_difference(site: StepContext, plan: Plan, smallest_bytes: int | None = None) -> str:
    """Explain why no plan is in force: under `plan`, results of compiled code differ in bits from the plain step's.

    `smallest_bytes` is the smallest peak of plans that keep the bits, if known.
    """
    verdict = compare_with_plain(site.model, site.step, site.batch, plan, site.optimizer, copies=True)
    relative = (verdict.relative_differences or {}).items()
    apart = ", ".join(f"{kind} {distance:.1e}" for kind, distance in relative if distance)
    apart = f"; relative differences: {apart}" if apart else ""
    least = "" if smallest_bytes is None else f" Plans that keep the bits need {format_bytes(smallest_bytes)}."
    return (
        f"under the plan the results of compiled code differ in bits: {list_differences(verdict)}{apart}. Where saved "
        "tensors are recomputed, inductor fuses other kernels, which may round or add in another order, as with "
        f"autocast: no plan is put in force.{least}\n  Give a larger budget, or compile the repeated blocks instead, "
        "each in place: `for block in model.layers: block.compile()`."
    )
