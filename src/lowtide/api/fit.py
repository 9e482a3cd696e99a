"""Fit a step into a budget in one call: rehearse, plan, verify, repair if the measured peak is too high, apply."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lowtide.api.apply import apply
from lowtide.api.compiled_fit import fit_compiled
from lowtide.api.fit_result import Fitted, FittedSizes
from lowtide.api.fitted import check_has_no_plan
from lowtide.api.plan_attempts import REPAIRS, build_over_budget, list_differences, plan_for, prove, with_choice
from lowtide.api.shape_buckets.fit_buckets import make_buckets
from lowtide.api.shape_buckets.shape_range import Range
from lowtide.api.verify import Verdict, compare_with_plain
from lowtide.errors import Infeasible, LowtideError, RehearsalError, StalePlan
from lowtide.levers import DEFAULT, LEVERS, find_lever
from lowtide.levers.lever import StepContext
from lowtide.levers.selection import Choice, choose, find_optimizer, suggest_levers
from lowtide.memory.device_budget import check_on_device, on_device
from lowtide.planner import plan
from lowtide.planner.inplace_savings import without_in_place
from lowtide.planner.planning import cheapest, find_smallest_plan, plain_peak_bytes, predict_unplanned_step
from lowtide.planner.records import Plan, Profile
from lowtide.profiler import REPLAYED_WHOLE, rehearse
from lowtide.profiler.preconditions import is_planned_by_its_compiler
from lowtide.report.text_table import listed
from lowtide.runtime.fingerprint import check_made_for, device_of, find_device
from lowtide.runtime.live_optimizers import Optimizers
from lowtide.state.reachable_objects import observe_changes
from lowtide.state.step_arguments import accept_batch
from lowtide.state.watched_process import check_not_watched
from lowtide.utils.amounts import BudgetFor, parse_budget
from lowtide.utils.interrupts import remove_if_interrupted
from lowtide.utils.messages import tell
from lowtide.utils.progress import showing

if TYPE_CHECKING:
    from torch import nn


@remove_if_interrupted
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
    that the step's code refers to. The proof lists changes that can't be restored, such as the position of an iterator
    or a file.

    If `step` does not call the optimizers of `model`, each trial step is followed by their update, whose memory counts.
    If no optimizer exists yet, the plan notes that, and a warning follows once optimizer state exists.

    Code that `torch.compile` compiles with inductor is recompiled under the plan, which then decides the tensors that
    the code's joint graphs save for backward. This applies to a model compiled as a whole, to a compiled function of
    `step` that calls `model`, and to compiled blocks of `model`, unless replaying whole blocks takes fewer FLOPs. All
    code that torch has compiled in the process is dropped before.

    A batch that is larger than `batch` runs under the plan with the smallest peak, with a warning that it may need more
    than the budget. After an error nothing is applied.

    Args:
        model: The model, on its device.
        step: Runs forward and backward of `model`, and optionally the optimizer. It is called with the batch, or with
            the items of a tuple or list as separate arguments.
        batch: The largest batch of the loop, in any nesting of containers.
        budget: Bytes, `"8GiB"`, `"500MB"`, or `"60%"` of the plain step's peak; on a GPU also `"90% of gpu"`, or
            `"auto"`: the memory that is free there less a margin for fragmentation. The budget is for all memory of the
            step: parameters, gradients, optimizer state and batch included, and anything else in memory, such as other
            models.
        budget_for: The bytes that the budget bounds: "requested" bytes, or on a GPU "reserved" bytes, which torch's
            caching allocator takes from the device. The simulated allocator computes reserved bytes from the requests
            of the verified step, and the cache is emptied at the end. `nvidia-smi` shows the CUDA context in addition.
        optimizer: The optimizer of `model`, or a list of them.
        profile: A profile from `rehearse` of the same step, which saves five runs.
        levers: Changes of the step that may be made where they help (`lowtide/levers`); trying a lever takes some more
            steps. The names are "outputs" (exact; the default), "fused optimizer", "unfused addmm", "loss head", "step
            in backward" and "micro-batches". With an inexact lever, the plan is compared bit by bit with the step that
            has the lever alone, and `verdict.relative_differences` measures the difference from the plain step.
        offload: Allow saved tensors to wait for backward in host memory, where that takes less time than recomputing
            them; not on a CPU.
        shapes: Gives smaller batches plans of their own, with less extra time or none: a small batch of the same form
            as `batch`, or "auto" for its sequences (without sequences, its rows) cut to a quarter. Each bucket of sizes
            between the two gets its own plan and proof, which takes some 30 steps. Excludes levers and offloading.
        in_place: Allow backward kernels to overwrite an incoming gradient with the gradient that is computed from it.
            If False, no kernel for this is registered where torch would look for it, so nothing in torch is changed
            (docs/process.md).
        progress: If False, no bar is shown on stderr; the log named "lowtide" has a line for each stage.

    Returns:
        The plan in force on `model`, with its proof; a FittedSizes if `shapes` is given.

    Raises:
        BudgetError: If the budget is not an amount of memory, or is one that only a GPU has (`"auto"`, `"90% of gpu"`)
            and the model is on another device.
        Infeasible: If no plan fits; the error has the smallest peak that a plan reaches.
        OverBudget: If measured peaks stay above the budget.
        RehearsalError: If the step can't be planned.
        ReplayMismatch: If recomputed values never equal the originals, for example because weights are written through
            `.data` between forward and backward.
        StalePlan: If `profile` is of another model, batch or device.
        LowtideError: If the model has a plan already (`lowtide.remove(model)` removes it), or if `fit` is called within
            a block of `lowtide.within`.

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
    check_not_watched()
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
    check_on_device(budget, find_device(model), budget_for)
    budget = on_device(budget, find_device(model), tell)
    levers = (levers,) if isinstance(levers, str) else levers
    kinds = [find_lever(name) for name in levers]
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
        usable = [lever.name for lever in LEVERS.values() if lever.needs_whole_compile]
        if set(levers) - {*usable} or offload or shapes is not None:
            raise LowtideError(
                f"{type(model).__name__} is compiled as a whole, which can be combined with the lever "
                f"{' or '.join(map(repr, usable))} only, not with other levers, offload or shapes: leave them out, or "
                "compile its repeated blocks instead (block.compile())."
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
        optimizer = find_optimizer(model, step, batch)
    inside = bool(profile.graphs)
    site = StepContext(model, step, batch, optimizer, in_place=profile.allows_in_place, inside_blocks=inside)
    if not inside:
        return _fit_measured(site, *_make_first_plan(site, profile, budget, levers, offload), offload, budget_for)
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
    """Fit a model with compiled blocks: recompute values inside the blocks, or run whole blocks again in backward.

    Whole blocks run again (are replayed) if that takes fewer FLOPs, or if no plan inside them fits. `rehearse_whole`
    returns the profile for replaying them; it is None if they must not be replayed.
    """
    whole = None
    try:
        choice, plan = _make_first_plan(site, profile, budget, levers, offload=False)
        if rehearse_whole is not None and plan.predicted.extra_flops:
            whole = rehearse_whole()
        if whole is None or not _is_cheaper_replayed(whole, plan):
            plan, verdict = fit_compiled(site, choice, plan, budget_for)
            return Fitted(apply(site.model, plan, optimizer=site.optimizer), choice.profile, plan, verdict)
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
    return _fit_measured(site, *_make_first_plan(site, whole, budget, levers, offload=False), False, budget_for)


def _fit_measured(site: StepContext, choice: Choice, plan: Plan, offload: bool, budget_for: BudgetFor) -> Fitted:
    """Measure plans, `plan` first, and put the first plan in force whose measured peak is within the budget.

    Each further plan aims lower, by the bytes by which the last measured peak exceeds the budget; the last of REPAIRS
    plans is the plan with the smallest peak. Raises OverBudget if all measured peaks are over the budget, or if there
    is no plan that aims lower, and RehearsalError if results differ in bits.
    """
    budget_bytes, measured = plan.budget_bytes, list[int]()
    while True:
        plan = replace(plan, budget_for=budget_for)
        verdict = prove(site, plan)
        if not verdict.identical:
            raise RehearsalError(_explain_other_bits(verdict))
        if verdict.within_budget:
            return Fitted(apply(site.model, plan, optimizer=site.optimizer), choice.profile, plan, verdict)
        measured.append(verdict.measured_peak_bytes)
        if len(measured) == REPAIRS:
            raise build_over_budget(choice.profile, budget_bytes, measured, budget_for=budget_for)
        aim_bytes = plan.predicted.peak_bytes - (verdict.measured_peak_bytes - budget_bytes)
        following = None
        if len(measured) < REPAIRS - 1 or offload:
            with suppress(Infeasible):
                following = plan_for(choice, max(1, aim_bytes), budget_bytes, offload)
        if following is None and not offload:
            following = with_choice(choice, find_smallest_plan(choice.profile), budget_bytes)
        if following is None or following.decisions == plan.decisions:
            raise build_over_budget(choice.profile, budget_bytes, measured, budget_for=budget_for)
        plan = following


def _is_cheaper_replayed(whole: Profile, inside: Plan) -> bool:
    """Return True if replaying whole blocks takes fewer FLOPs than the plan `inside` the blocks.

    `whole` is the profile in which whole blocks are replayed.
    """
    try:
        return cheapest(whole, inside.budget_bytes).extra_flops < inside.predicted.extra_flops
    except Infeasible:
        return False


def _make_first_plan(
    site: StepContext, profile: Profile, budget: int | str, levers: Collection[str], offload: bool
) -> tuple[Choice, Plan]:
    """Choose the levers that help, and make the first plan. Raises Infeasible, naming further levers that may help."""
    plain = predict_unplanned_step(profile)
    budget_bytes = parse_budget(budget, plain_peak_bytes=plain_peak_bytes(profile))
    if profile.levers:  # the step was rehearsed with levers
        if unasked := [lever.name for lever in profile.levers if lever.name not in levers]:
            raise StalePlan(f"this profile was made with {unasked}: name them in levers=, or rehearse again.")
        choice = Choice(profile, plain)
    else:
        choice = choose(site, profile, plain, budget_bytes, levers)
        if noticed := _find_inexact_levers(site, choice.profile):
            without = choose(site, profile, plain, budget_bytes, [name for name in levers if name not in noticed])
            choice = replace(without, notes={**without.notes, **noticed})
    try:
        return choice, plan_for(choice, budget_bytes, budget_bytes, offload)
    except Infeasible as error:
        nearest = () if profile.graphs else suggest_levers(site, levers, choice.notes, error)
        raise error.with_advice(nearest=nearest, notes=choice.notes.values()) from None


def _find_inexact_levers(site: StepContext, profile: Profile) -> dict[str, str]:
    """Run the step with the exact levers of `profile`; if its bits differ, return a note for each lever, by its name.

    A lever that is exact for most steps can change the bits of some, such as a step that reads gradients after the
    lever has freed them. Default levers are not checked. Returns an empty dict if all bits are equal.
    """
    exact = [lever.name for lever in profile.levers if lever.exact and lever.name not in DEFAULT]
    if not exact:
        return {}
    verdict = compare_with_plain(site.model, site.step, site.batch, plan(profile, "100%"), site.optimizer)
    if verdict.identical:
        return {}
    why = f"with it, bits of the {listed(verdict.differing)} differ"
    return {name: f"lever {name!r} is not used: {why}" for name in exact}


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

    return FittedSizes(model, make_buckets(model, step, sizes, budget, fit_one, optimizer=optimizer, large=profile))


def _explain_other_bits(verdict: Verdict) -> str:
    differences = list_differences(verdict)
    return (
        f"under the plan the results of the step differ in bits: {differences}. Plain steps from the same "
        "state agree there. If the step reads something that a rehearsal can't restore (a clock, a file, its own "
        "random numbers), leave that out; if not, please report it."
    )
