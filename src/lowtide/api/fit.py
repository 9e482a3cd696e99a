"""Fit a step into a budget in one call: rehearse, plan, verify, repair if the measured peak is too high, apply."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lowtide.api.apply import Applied, apply
from lowtide.api.differing_bits import REFUSED, differing_addresses, with_kept
from lowtide.api.fitted import check_has_no_plan
from lowtide.api.shape_buckets.dispatch import Switched, Switching
from lowtide.api.shape_buckets.fit_buckets import Bucket, buckets_for
from lowtide.api.shape_buckets.shape_range import Range
from lowtide.api.verify import Verdict, compare_with_plain, scheduled_peak
from lowtide.errors import Infeasible, LowtideError, OverBudget, RehearsalError, StalePlan
from lowtide.levers import DEFAULT, lever_named
from lowtide.levers.lever import StepContext
from lowtide.levers.selection import Choice, choose, optimizer_of, suggest_levers
from lowtide.levers.unfused_addmm import UnfusedAddmm
from lowtide.memory.device_budget import check_on_device, on_device
from lowtide.planner import plan
from lowtide.planner.inplace_savings import without_in_place
from lowtide.planner.planning import cheapest, forecast_peak, plain_peak_bytes, smallest_plan, unplanned_step, with_peak
from lowtide.planner.records import Decisions, Plan, Profile
from lowtide.profiler import OTHER_WORK, REPLAYED_WHOLE, rehearse
from lowtide.profiler.preconditions import is_planned_by_its_compiler
from lowtide.report.run_record import RunRecord, record_of
from lowtide.report.text_table import decisions, extra_time, lever_lines, listed
from lowtide.runtime.fingerprint import check_made_for, device_of, place_of
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.state.reachable_objects import observe_changes
from lowtide.state.step_arguments import accept_batch
from lowtide.state.step_outcome import unless_out_of_memory
from lowtide.units import format_bytes, format_change, format_time
from lowtide.utils.amounts import BudgetFor, parse_budget
from lowtide.utils.interrupts import removed_if_interrupted
from lowtide.utils.messages import tell
from lowtide.utils.progress import Stage, showing
from lowtide.utils.removable import Removable
from lowtide.utils.rendering import Displayed, short_repr

if TYPE_CHECKING:
    from torch import nn

REPAIRS = 4
"""Largest number of plans that are tried for a budget. Each aims lower by the excess of the one before."""
FORECAST = "before it was compiled"
"""Beginning of the note on the forecast of a compiled plan's peak."""
SCHEDULED = 4
"""Largest number of plans for compiled code that are measured without kernels."""
COMPILED_REPAIRS = 3
"""Largest number of compiled plans that are tried for a budget."""
FORECAST_MARGIN = 1.2
"""Ratio up to which a peak that is forecast for compiled code may be above the measured one."""
UNUSED = 0.02
"""Share of a budget that a compiled plan may leave unused before a cheaper plan is tried."""
CLOSE = 0.02
"""Share by which measured peaks may exceed a budget that plans with larger forecasts are tried for."""


class Fitted(Removable, Displayed):
    """A model whose step fits: the plan in force, and its proof. `print` it; undo it with `remove()` or `with`."""

    def __init__(self, applied: Applied | Switched, profile: Profile, plan: Plan, verdict: Verdict) -> None:
        self.applied = applied
        applied.holder = self
        self.profile = profile
        self.plan = plan
        self.verdict = verdict

    def remove(self) -> None:
        """Restore the model."""
        self.applied.remove()

    def __reduce__(self) -> NoReturn:
        raise LowtideError(
            f"a {type(self).__name__} is a plan in force on one model, and can't be copied or pickled. Copy the "
            "model (the copy has no plan) and apply the plan to it: lowtide.apply(copy, fitted.plan). "
            "fitted.plan.to_json(path) saves the plan."
        )

    def __repr__(self) -> str:
        peak, proven = _peak(self.plan, self.verdict), "proven" if self.verdict.proven else "NOT proven"
        return short_repr(type(self).__name__, f"{self.plan.fingerprint.model}: {peak}, {proven}")

    def to_record(self, command: str = "") -> RunRecord:
        """Return the results of this fit as a RunRecord, from which reports are made.

        Args:
            command: Code that repeats the fit; a call of `lowtide.fit` by default.
        """
        call = command or f"lowtide.fit(model, step, batch, budget={self.plan.budget_bytes})"
        return record_of(call, profile=self.profile, plan=self.plan, proof=self.verdict.to_proof())

    def __str__(self) -> str:
        plan, verdict = self.plan, self.verdict
        return self._with_proof([f"{_peak(plan, verdict)}{_time(plan, verdict)}", decisions(plan), *lever_lines(plan)])

    def _with_proof(self, lines: list[str]) -> str:
        """Join `lines`, the proof and the notes of rehearsal and levers; a failed proof comes first."""
        proof = [self.verdict.proof]
        notes = [f"note: {note}" for note in self.plan.notes]
        return "\n".join((lines + proof if self.verdict.proven else proof + lines) + notes)


class FittedSizes(Fitted):
    """A model whose steps fit at every size: a plan for each bucket of sizes.

    Attributes shared with `Fitted` are those of the largest bucket.
    """

    def __init__(self, model: nn.Module, buckets: list[Bucket]) -> None:
        last = buckets[-1]
        super().__init__(Switched(Switching(model, buckets)), last.profile, last.plan, last.verdict)
        self.buckets = tuple(buckets)
        """Buckets, smallest first."""

    def __str__(self) -> str:
        return self._with_proof([_in_a_line(bucket) for bucket in self.buckets])


def _in_a_line(bucket: Bucket) -> str:
    """Format as `up to [8, 128]: 612 -> 480 MiB peak (budget 480 MiB), 212 ms -> 223 ms a step measured, ...`."""
    plan, verdict = bucket.plan, bucket.verdict
    time = _time(plan, verdict) if plan.decisions != Decisions() else ""
    return f"up to {bucket.size}: {_peak(plan, verdict)}{time}; {decisions(plan)}"


def _peak(plan: Plan, verdict: Verdict) -> str:
    """Format the peak: `14.9 -> 7.8 GiB peak (budget 8 GiB)`."""
    budget = f"(budget {format_bytes(plan.budget_bytes)})"
    if verdict.budget_for == "reserved":  # for the plain step requested bytes are known only
        return f"{format_bytes(verdict.measured_peak_bytes)} peak reserved {budget}"
    return f"{format_change(plan.plain.peak_bytes, verdict.measured_peak_bytes)} peak {budget}"


def _time(plan: Plan, verdict: Verdict) -> str:
    """Format times: `, 212 ms -> 223 ms a step measured, +4.1 % time predicted, bound +3.8 %`."""
    before = "" if verdict.plain_ms is None else f"{format_time(verdict.plain_ms)} -> "
    return f", {before}{format_time(verdict.planned_ms)} a step measured{extra_time(plan)}"


@removed_if_interrupted
def fit(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    budget: int | str,
    budget_for: BudgetFor = "requested",
    optimizer: Optimizers = None,
    profile: Profile | None = None,
    levers: Collection[str] = DEFAULT,
    offload: bool = False,
    shapes: Any = None,
    in_place: bool = True,
    progress: bool = True,
) -> Fitted:
    """Make `step(batch)` run within `budget` bytes at the least extra time, and prove it. The loop stays unchanged.

    The step is run about ten times here. Afterwards parameters, gradients, buffers, optimizer state and random number
    generators are restored, and so are schedulers, gradient scalers, other modules, numbers, strings and containers
    that its code refers to. The proof names other changes that these runs make, such as the position of an iterator or
    a file.

    If `step` does not call the optimizers of `model`, each trial step is followed by their update, so that its memory
    counts. If no optimizer exists yet, the plan notes that, and a warning comes once its state exists.

    A model that `torch.compile` compiles as a whole with inductor is recompiled under the plan, which then decides the
    tensors that its joint graphs save for backward; so is a compiled function of `step` that calls `model`, and so are
    blocks of `model`, unless replaying them as a whole takes fewer FLOPs. All code that torch has compiled in the
    process is dropped for that.

    A batch that is larger than `batch` runs under the plan with the smallest peak, with a warning that it may need more
    than the budget. After an error nothing is applied.

    Args:
        model: The model, on its device.
        step: Runs forward and backward of `model`, and optionally the optimizer. It takes the batch, or as many
            arguments as a batch that is a tuple or list has.
        batch: The largest batch of the loop, in any nesting of containers.
        budget: Bytes, `"8GiB"`, `"500MB"`, or `"60%"` of the plain step's peak; on a GPU also `"90% of gpu"`, or
            `"auto"`: the memory that is free there less a margin for fragmentation. The budget is for all memory of the
            step: parameters, gradients, optimizer state and batch included, and anything else in memory, such as other
            models.
        budget_for: The bytes that the budget bounds: the "requested" ones, or on a GPU "reserved" ones, those that its
            allocator takes from the device. Reserved bytes are computed by the simulated allocator from the requests of
            the verified step, and the cache is emptied at the end. `nvidia-smi` shows the CUDA context in addition.
        optimizer: The optimizer of `model`, or a list of them.
        profile: A profile from `rehearse` of the same step, which saves five runs.
        levers: Changes of the step that may be made where they pay (`lowtide/levers`); each that is tried takes some
            more steps. The names are "outputs" (exact; the default), "fused optimizer", "unfused addmm", "loss head",
            "step in backward" and "micro-batches". With an inexact lever, the plan is compared bit by bit with the step
            that has the lever alone, and `verdict.relative_differences` measures the difference from the plain step.
        offload: Allow saved tensors to wait for backward in host memory, where that takes less time than recomputing
            them; not on a CPU.
        shapes: Makes smaller batches pay less or nothing: a small batch of the same form as `batch`, or "auto" for its
            sequences (without sequences, its rows) cut to a quarter. Each bucket of sizes between the two gets its own
            plan and proof, which takes some 30 steps. Excludes levers and offloading.
        in_place: Allow writing a gradient over the one that it is computed from. If False, no such write happens and no
            kernel is registered where torch would look for it, so nothing in torch is changed (docs/process.md).
        progress: If False, no bar is shown on stderr; the log named "lowtide" has a line for each stage.

    Returns:
        The plan in force on `model`, with its proof; a FittedSizes with `shapes`.

    Raises:
        BudgetError: If the budget is not an amount of memory, or is one that only a GPU has (`"auto"`, `"90% of gpu"`)
            and the model is on another device.
        Infeasible: If no plan fits; it has the smallest peak that a plan reaches.
        OverBudget: If measured peaks stay above the budget.
        RehearsalError: If the step can't be planned.
        ReplayMismatch: If recomputed values never equal the originals, for example because weights are written through
            `.data` between forward and backward.
        StalePlan: If `profile` is of another model, batch or device.
        LowtideError: If the model has a plan already (`lowtide.remove(model)` removes it).

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> fitted = lowtide.fit(model, step, batch, budget="90%")
        >>> fitted.verdict.within_budget, fitted.verdict.identical
        (True, True)
        >>> step(batch)  # the loop stays unchanged
        >>> fitted.remove()
    """
    check_has_no_plan(model)
    step = accept_batch(step, batch)
    changes = observe_changes(model, step, batch)
    with showing(progress):
        fitted = _fit(model, step, batch, budget, budget_for, optimizer, profile, levers, offload, in_place, shapes)
    fitted.verdict = replace(fitted.verdict, changes=changes())
    if budget_for == "reserved":
        torch.cuda.empty_cache()
    return fitted


def _fit(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    budget: int | str,
    budget_for: BudgetFor,
    optimizer: Optimizers,
    profile: Profile | None,
    levers: Collection[str],
    offload: bool,
    in_place: bool,
    shapes: Any,
) -> Fitted:
    check_on_device(budget, place_of(model), budget_for)
    budget = on_device(budget, place_of(model), tell)
    levers = (levers,) if isinstance(levers, str) else levers
    kinds = [lever_named(name) for name in levers]
    if isinstance(shapes, str) and shapes != "auto":
        raise LowtideError(f'shapes takes "auto" or a batch that is smaller than `batch`; found {shapes!r}.')
    has_changes = bool(set(levers) - set(DEFAULT)) or offload
    if shapes is not None and has_changes:
        raise LowtideError("shapes can't be combined with levers or offload: leave one of them out.")
    if offload and device_of(model) == "cpu":
        raise LowtideError("offload=True copies tensors from the device to the host, and this model is on the CPU.")
    has_blocks = not is_planned_by_its_compiler(model, step)
    """True unless the model or the step is compiled as a whole: only blocks may be compiled."""
    may_replay = profile is None and has_blocks
    if profile is None:
        inside = not has_changes and shapes is None
        profile = rehearse(model, step, batch, optimizer=optimizer, in_place=in_place, inside_blocks=inside)
    else:
        check_made_for(Profile.expect(profile, "fit(profile=...)").fingerprint, model, batch, what="profile")
        profile = profile if in_place else without_in_place(profile)
    if profile.graphs and not has_blocks:
        levers = [name for name in levers if name not in DEFAULT]
        if set(levers) - {UnfusedAddmm.name} or offload or shapes is not None:
            raise LowtideError(
                f"{type(model).__name__} is compiled as a whole, which can be combined with the lever "
                f"{UnfusedAddmm.name!r} only, not with other levers, offload or shapes: leave them out, or compile "
                "its repeated blocks instead (block.compile())."
            )
    if profile.graphs and has_blocks and (has_changes or shapes is not None):
        raise LowtideError(
            f"this profile is for plans inside the compiled blocks of {type(model).__name__}, which can't be "
            "combined with other levers, offload or shapes. Leave profile= out: the blocks are then rehearsed to be "
            "replayed whole."
        )
    if shapes is not None:
        sizes = Range(batch, None if isinstance(shapes, str) else shapes)
        return _fit_sizes(model, step, sizes, budget, budget_for, optimizer, profile)
    if optimizer is None and any(kind.wants_optimizer for kind in kinds):
        optimizer = optimizer_of(model, step, batch)
    inside = bool(profile.graphs)
    site = StepContext(model, step, batch, optimizer, in_place=profile.allows_in_place, inside_blocks=inside)
    if not inside:
        return _measured_within(site, *_first(site, profile, budget, levers, offload), offload, budget_for)
    whole = partial(rehearse, model, step, batch, optimizer=optimizer, in_place=in_place, inside_blocks=False)
    return _fit_blocks(site, profile, budget, levers, budget_for, whole if may_replay else None)


def _fit_blocks(
    site: StepContext,
    profile: Profile,
    budget: int | str,
    levers: Collection[str],
    budget_for: BudgetFor,
    rehearse_whole: Callable[[], Profile] | None,
) -> Fitted:
    """Fit inside compiled blocks, or by replaying them whole if that takes fewer FLOPs or no plan inside them fits.

    Without `rehearse_whole`, which returns the profile for that, they are not replayed.
    """
    whole = None
    try:
        choice, made = _first(site, profile, budget, levers, offload=False)
        if rehearse_whole is not None and made.predicted.extra_flops:
            whole = rehearse_whole()
        if whole is None or not _is_cheaper_replayed(whole, made):
            made, verdict = _compiled(site, choice, made, budget_for)
            return Fitted(apply(site.model, made, optimizer=site.optimizer), choice.profile, made, verdict)
        note = f"{REPLAYED_WHOLE}, which takes fewer FLOPs than any plan inside them"
    except (Infeasible, RehearsalError) as why:
        if rehearse_whole is None:
            raise
        note = f"{REPLAYED_WHOLE}: inside them, {str(why).splitlines()[0]}"
    if whole is None:
        assert rehearse_whole is not None
        whole = rehearse_whole()
    whole = replace(whole, notes=(*whole.notes, note))
    site = replace(site, in_place=whole.allows_in_place, inside_blocks=False)
    return _measured_within(site, *_first(site, whole, budget, levers, offload=False), False, budget_for)


def _measured_within(site: StepContext, choice: Choice, made: Plan, offload: bool, budget_for: BudgetFor) -> Fitted:
    """Put the first plan in force that is measured within the budget: `made`, or one that aims lower by the excess.

    Raises OverBudget after REPAIRS plans, or if no plan aims lower, and RehearsalError for other bits.
    """
    budget_bytes, measured = made.budget_bytes, list[int]()
    while True:
        made = replace(made, budget_for=budget_for)
        verdict = _proof(site, made)
        if not verdict.identical:
            raise RehearsalError(_not_identical(verdict))
        if verdict.within_budget:
            return Fitted(apply(site.model, made, optimizer=site.optimizer), choice.profile, made, verdict)
        measured.append(verdict.measured_peak_bytes)
        if len(measured) == REPAIRS:
            raise over_budget(choice.profile, budget_bytes, measured, budget_for=budget_for)
        aim_bytes = made.predicted.peak_bytes - (verdict.measured_peak_bytes - budget_bytes)
        try:
            made = _planned(choice, max(1, aim_bytes), budget_bytes, offload)
        except Infeasible:
            least = smallest_plan(choice.profile)
            if least.decisions == made.decisions or offload:
                raise over_budget(choice.profile, budget_bytes, measured, budget_for=budget_for) from None
            made = _own(choice, least, budget_bytes)


def _is_cheaper_replayed(whole: Profile, inside: Plan) -> bool:
    """Return True if replays of whole blocks, as `whole` knows them, take fewer FLOPs than the plan `inside` them."""
    try:
        return cheapest(whole, inside.budget_bytes).extra_flops < inside.predicted.extra_flops
    except Infeasible:
        return False


def _compiled(site: StepContext, choice: Choice, made: Plan, budget_for: BudgetFor) -> tuple[Plan, Verdict]:
    """Return the cheapest of a few plans that is measured within the budget, with its proof; `made` is the first.

    On a CPU, plans are first measured without kernels, which is soon done; the best one of these is compiled. If its
    bits are not those of the plain step, the recomputed values that change them are searched for, and the next plans
    keep them. Raises Infeasible with the smallest measured peak, and RehearsalError for other bits.
    """
    made, kept = _scheduled(site, choice, replace(made, budget_for=budget_for)), tuple[str, ...]()
    while True:
        best, proofs = _proven(site, choice, made)
        last, verdict = proofs[-1]
        if verdict.identical or (best is not None and best.predicted.peak_bytes <= made.budget_bytes):
            break
        if kept or not last.recompute:
            raise RehearsalError(_compiled_differs(site, last))
        kept = differing_addresses(tuple(last.recompute), partial(_is_identical, site, last))
        choice = replace(choice, profile=with_kept(choice.profile, kept))
        try:
            made = replace(_planned(choice, made.budget_bytes, made.budget_bytes, offload=False), budget_for=budget_for)
            made = _scheduled(site, choice, made)
        except Infeasible as why:
            raise RehearsalError(_compiled_differs(site, last, why.smallest_peak_bytes)) from why
    assert best is not None  # bits were those of the plain step
    if best.predicted.peak_bytes > made.budget_bytes:
        raise compiled_over(choice, best, f"plans that were compiled and measured: {len(proofs)}")
    if len(proofs) > 1:
        best = replace(best, notes=(*best.notes, f"{len(proofs)} plans were compiled and measured"))
    if kept:
        best = replace(best, notes=(*best.notes, f"kept: {listed(kept)} ({REFUSED})"))
    return best, next(proof for tried, proof in proofs if tried.decisions == best.decisions)


def _proven(site: StepContext, choice: Choice, made: Plan) -> tuple[Plan | None, list[tuple[Plan, Verdict]]]:
    """Return the best of a few compiled plans whose bits are those of the plain step, and all that were compiled."""
    proofs: list[tuple[Plan, Verdict]] = []

    def peak_of(tried: Plan) -> int | None:
        verdict = _proof(site, tried)
        proofs.append((tried, verdict))
        return verdict.measured_peak_bytes if verdict.identical else None

    _, best = cheapest_within(choice, made, peak_of, COMPILED_REPAIRS)
    return best, proofs


def _scheduled(site: StepContext, choice: Choice, made: Plan) -> Plan:
    """Return the best of a few plans that are measured without kernels: on a CPU, for a budget of requested bytes.

    Raises Infeasible if none is within the budget.
    """
    if made.decisions == Decisions() or made.budget_for != "requested" or place_of(site.model).type != "cpu":
        return made
    peak_of = partial(scheduled_peak, site.model, site.step, site.batch, optimizer=site.optimizer)
    n_scheduled, best = cheapest_within(choice, made, peak_of, SCHEDULED)
    if best is not None and best.predicted.peak_bytes > made.budget_bytes:
        raise compiled_over(choice, best, f"plans that were scheduled by inductor and measured: {n_scheduled}")
    return best or made


def _is_identical(site: StepContext, made: Plan, addresses: Collection[str]) -> bool:
    """Return True if the step has the plain step's bits when it recomputes just the values at `addresses`."""
    return _proof(site, replace(made, recompute={at: made.recompute[at] for at in addresses})).identical


def cheapest_within(
    choice: Choice, made: Plan, peak_of: Callable[[Plan], int | None], most: int
) -> tuple[int, Plan | None]:
    """Return the number of plans tried, and the cheapest one measured within the budget, else the one with the lowest
    peak.

    Args:
        choice: The profile, and the levers.
        made: The first plan; each other one is made from the forecast, corrected by the excess of the one before.
        peak_of: Function that measures a plan's peak; it returns None for a plan that can't be used.
        most: Largest number of plans to try.
    """
    budget_bytes, tried, best = made.budget_bytes, list[Decisions](), None
    while True:
        peak_bytes = peak_of(made)
        tried.append(made.decisions)
        if peak_bytes is None:
            break
        measured = as_measured(made, peak_bytes)
        if best is None or _rank(measured) < _rank(best):
            best = measured
        if len(tried) == most or 0 <= 1 - peak_bytes / budget_bytes <= UNUSED or made.budget_for == "reserved":
            break
        forecast_bytes = forecast_peak(choice.profile, made)
        following = _following(with_excess(choice.profile, peak_bytes - forecast_bytes), budget_bytes)
        if following.decisions in tried and best.predicted.peak_bytes > budget_bytes:  # others may be off by less
            aims = [(forecast_bytes + peak_bytes) // 2] if peak_bytes > forecast_bytes else []
            if best.predicted.peak_bytes <= (1 + CLOSE) * budget_bytes:
                aims += [int(forecast_bytes * (1 + share)) for share in (CLOSE / 2, CLOSE)]
            others = (_following(choice.profile, aim_bytes) for aim_bytes in aims)
            following = next((each for each in others if each.decisions not in tried), following)
        if following.decisions in tried or _rank(best) < (False, following.predicted.extra_ms):
            break
        made = replace(_own(choice, following, budget_bytes), budget_for=made.budget_for)
    return len(tried), best


def _following(profile: Profile, aim_bytes: int) -> Plan:
    """Return a plan whose forecast is `aim_bytes` at most; if there is none, the plan with the smallest peak."""
    try:
        return forecast_plan(profile, aim_bytes)
    except Infeasible:
        return smallest_plan(profile)


def _rank(measured: Plan) -> tuple[bool, float]:
    """Return a sort key for measured plans: first those within the budget, by time; then the others, by peak."""
    peak_bytes = measured.predicted.peak_bytes
    is_over = peak_bytes > measured.budget_bytes
    return is_over, peak_bytes if is_over else measured.predicted.extra_ms


def compiled_over(choice: Choice, lowest: Plan, tried: str) -> Infeasible:
    """Build the error for a budget that no compiled plan keeps; `lowest` has the smallest measured peak."""
    return Infeasible(
        budget_bytes=lowest.budget_bytes,
        smallest_peak_bytes=lowest.predicted.peak_bytes,
        parts=lowest.predicted.parts,
        notes=(tried, *choice.profile.notes),
    )


def as_measured(made: Plan, peak_bytes: int) -> Plan:
    """Return a compiled plan with its measured peak as prediction; a note says how far off the forecast was."""
    if made.predicted == made.plain and peak_bytes <= made.budget_bytes:  # nothing is compiled for the plan
        return made
    apart = peak_bytes / made.predicted.peak_bytes - 1
    made = replace(made, notes=tuple(note for note in made.notes if not note.startswith(FORECAST)))
    note = f"{FORECAST}, {format_bytes(made.predicted.peak_bytes)} were forecast: {apart:+.1%} measured"
    return replace(made, predicted=with_peak(made.predicted, peak_bytes), notes=(*made.notes, note))


def forecast_plan(profile: Profile, budget: int | str) -> Plan:
    """Return a plan for compiled code, or the one with the smallest peak if its forecast is little above the budget.

    Forecasts may be too high, and only compiling tells. Raises Infeasible.
    """
    try:
        return plan(profile, budget)
    except Infeasible as why:
        if why.smallest_peak_bytes > FORECAST_MARGIN * why.budget_bytes:
            raise
        return replace(smallest_plan(profile), budget_bytes=why.budget_bytes)


def _first(
    site: StepContext, profile: Profile, budget: int | str, levers: Collection[str], offload: bool
) -> tuple[Choice, Plan]:
    """Return the levers that pay, and the first plan. Raises Infeasible, which names further levers that may help."""
    plain = unplanned_step(profile)
    budget_bytes = parse_budget(budget, of=plain_peak_bytes(profile))
    if profile.levers:  # chosen before
        if unasked := [lever.name for lever in profile.levers if lever.name not in levers]:
            raise StalePlan(f"this profile was made with {unasked}: name them in levers=, or rehearse again.")
        choice = Choice(profile, plain)
    else:
        choice = choose(site, profile, plain, budget_bytes, levers)
        if noticed := _noticed(site, choice.profile):
            without = choose(site, profile, plain, budget_bytes, [name for name in levers if name not in noticed])
            choice = replace(without, notes={**without.notes, **noticed})
    try:
        return choice, _planned(choice, budget_bytes, budget_bytes, offload)
    except Infeasible as error:
        raise Infeasible(
            budget_bytes=error.budget_bytes,
            smallest_peak_bytes=error.smallest_peak_bytes,
            parts=error.parts,
            extra_ratio=error.extra_ratio,
            nearest=() if profile.graphs else suggest_levers(site, levers, choice.notes, error),
            notes=(*error.notes, *choice.notes.values()),
        ) from None


def _noticed(site: StepContext, profile: Profile) -> dict[str, str]:
    """Return the requested levers that are exact, yet change the step's bits, with notes on them.

    A step that reads gradients after backward may notice such a lever.
    """
    exact = [lever.name for lever in profile.levers if lever.exact and lever.name not in DEFAULT]
    if not exact:
        return {}
    verdict = compare_with_plain(site.model, site.step, site.batch, plan(profile, "100%"), site.optimizer)
    if verdict.identical:
        return {}
    why = f"with it, bits of the {listed(verdict.differing)} differ"
    return {name: f"lever {name!r} is not used: {why}" for name in exact}


def over_budget(
    made: Profile | Plan,
    budget_bytes: int,
    measured: Collection[int],
    nearest: Collection[str] = (),
    *,
    budget_for: BudgetFor = "requested",
) -> OverBudget:
    """Build the error for a budget that no plan keeps; `measured` are the peaks of the plans that were tried."""
    notes = made.notes if any(OTHER_WORK in note for note in made.notes) else (*made.notes, OTHER_WORK)
    plain_bytes = made.plain.peak_bytes if isinstance(made, Plan) else plain_peak_bytes(made)
    if budget_for == "reserved":
        notes = ("these are reserved bytes, with fragments that the allocator can't use", *notes)
    elif min(measured) > plain_bytes:
        notes = (
            f"that is more than the plain step's {format_bytes(plain_bytes)}: this batch needs more than the "
            "rehearsed ones because of its contents, such as lengths, or something else was in memory, such as the "
            "graph of a batch that was skipped before its backward (`lowtide watch` names what a script leaves there, "
            "and its holder)",
            *notes,
        )
    return OverBudget(budget_bytes=budget_bytes, measured_peak_bytes=min(measured), nearest=nearest, notes=notes)


def _planned(choice: Choice, aim_bytes: int, budget_bytes: int, offload: bool) -> Plan:
    """Plan for `aim_bytes`, so that the measured peak is within the budget."""
    with Stage("planning") as stage:
        is_compiled = bool(choice.profile.graphs)
        made = (
            forecast_plan(choice.profile, aim_bytes)
            if is_compiled
            else plan(choice.profile, aim_bytes, offload=offload)
        )
        budget, predicted = format_bytes(budget_bytes), format_bytes(made.predicted.peak_bytes)
        stage.result = f"planned for {budget}: {predicted} peak predicted"
    return _own(choice, made, budget_bytes)


def with_excess(profile: Profile, excess_bytes: int) -> Profile:
    """Raise all peaks of `profile` by the excess, which may be negative, of a measured peak over its forecast."""
    return replace(profile, static=replace(profile.static, margin=profile.static.margin + excess_bytes))


def _own(choice: Choice, made: Plan, budget_bytes: int) -> Plan:
    """Return `made` for the budget `budget_bytes`, its time compared with that of the step without levers."""
    return replace(made, budget_bytes=budget_bytes, plain=choice.plain, notes=(*made.notes, *choice.notes.values()))


def _proof(site: StepContext, made: Plan) -> Verdict:
    """Run the step under the plan and without it, and compare. Raises RehearsalError if the device has no room for the
    budget.
    """

    def no_room(said: str) -> RehearsalError:
        return RehearsalError(
            f"a step under a plan for {format_bytes(made.budget_bytes)} ran out of memory: {said}\n"
            "  A device has to hold more than the step: a CUDA context, fragments between blocks, and other "
            "processes' memory. Give a smaller budget."
        )

    return unless_out_of_memory(
        lambda: compare_with_plain(site.model, site.step, site.batch, made, site.optimizer), no_room
    )


def _fit_sizes(
    model: nn.Module,
    step: Callable[[Any], Any],
    sizes: Range,
    budget: int | str,
    budget_for: BudgetFor,
    optimizer: Optimizers,
    profile: Profile,
) -> FittedSizes:
    def fit_one(batch: Any, budget_bytes: int, profile: Profile) -> tuple[Plan, Verdict]:
        with _fit(model, step, batch, budget_bytes, budget_for, optimizer, profile, (), False, True, None) as fitted:
            return fitted.plan, fitted.verdict

    return FittedSizes(model, buckets_for(model, step, sizes, budget, fit_one, optimizer=optimizer, large=profile))


def _differing(verdict: Verdict) -> str:
    differences = (verdict.differences or {}).items()
    differing = {kind: names for kind, names in differences if names and kind not in verdict.nondeterministic}
    return ", ".join(f"{kind} ({len(names)}, first {names[0]})" for kind, names in differing.items())


def _compiled_differs(site: StepContext, made: Plan, smallest_bytes: int | None = None) -> str:
    """Explain why no plan is put in force: under `made` bits differ, and plans that keep them need `smallest_bytes`."""
    verdict = compare_with_plain(site.model, site.step, site.batch, made, site.optimizer, copies=True)
    relative = (verdict.relative_differences or {}).items()
    apart = ", ".join(f"{kind} {distance:.1e}" for kind, distance in relative if distance)
    apart = f"; relative differences: {apart}" if apart else ""
    least = "" if smallest_bytes is None else f" Plans that keep the bits need {format_bytes(smallest_bytes)}."
    return (
        f"under the plan the results of compiled code differ in bits: {_differing(verdict)}{apart}. Where saved "
        "tensors are recomputed, inductor fuses other kernels, which may round or add in another order, as with "
        f"autocast: no plan is put in force.{least}\n  Give a larger budget, or compile the repeated blocks instead, "
        "each in place: `for block in model.layers: block.compile()`."
    )


def _not_identical(verdict: Verdict) -> str:
    return (
        f"under the plan the results of the step differ in bits: {_differing(verdict)}. Plain steps from the same "
        "state agree there. If the step reads something that a rehearsal can't restore (a clock, a file, its own "
        "random numbers), leave that out; if not, please report it."
    )
