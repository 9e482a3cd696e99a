"""The whole way in one call: rehearse, plan, verify, repair where the measured peak says so, apply."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from lowtide.api.apply import Applied, apply
from lowtide.api.fitted import check_has_no_plan
from lowtide.api.shape_buckets.dispatch import Switched, Switching
from lowtide.api.shape_buckets.fit_buckets import Bucket, buckets_for
from lowtide.api.shape_buckets.shape_range import Range
from lowtide.api.verify import Verdict, verify
from lowtide.errors import Infeasible, LowtideError, OverBudget, RehearsalError, StalePlan
from lowtide.levers import DEFAULT, named
from lowtide.levers.lever import StepContext
from lowtide.levers.products_apart import ProductsApart
from lowtide.levers.selection import Choice, advice, choose, optimizer_of
from lowtide.memory.device_budget import on_device
from lowtide.planner import plan
from lowtide.planner.inplace_savings import without_in_place
from lowtide.planner.planning import plain_peak_bytes, smallest_plan, unplanned_step
from lowtide.planner.records import Decisions, Plan, Profile
from lowtide.profiler import OTHER_WORK, rehearse
from lowtide.report.text_table import decisions, extra_time, lever_lines, listed
from lowtide.runtime.fingerprint import Optimizers, check_made_for, device_of, place_of
from lowtide.state.reachable_objects import looking_on
from lowtide.state.step_arguments import of_one_argument
from lowtide.state.step_outcome import unless_out_of_memory
from lowtide.units import format_bytes, format_change, format_time
from lowtide.utils.amounts import check_budget, parse_budget
from lowtide.utils.interrupts import held_back
from lowtide.utils.messages import tell
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from torch import nn

REPAIRS = 4
"""Plans that are tried before a budget is given up: each aims lower by what the last one was over."""
COMPILED_REPAIRS = 3
"""The same where each is compiled."""


class Fitted(Removable):
    """A model whose step fits: the plan in force, and its proof. `print` it; undo it with `remove()` or `with`."""

    def __init__(self, applied: Applied | Switched, profile: Profile, plan: Plan, verdict: Verdict) -> None:
        self.applied = applied
        applied.holder = self
        self.profile = profile
        self.plan = plan
        self.verdict = verdict

    def remove(self) -> None:
        """Give the model back as it was."""
        self.applied.remove()

    def __reduce__(self) -> NoReturn:
        raise LowtideError(
            f"a {type(self).__name__} is a plan in force on one model: it can't be copied or pickled. Copy the model, "
            "which has no plan then, and put the plan on it with lowtide.apply(model, fitted.plan); "
            "fitted.plan.to_json(path) keeps it."
        )

    def __str__(self) -> str:
        plan, verdict = self.plan, self.verdict
        return self._told([f"{_peak(plan, verdict)}{_time(plan, verdict)}", decisions(plan), *lever_lines(plan)])

    def _told(self, lines: list[str]) -> str:
        """`lines` with the proof, which comes first where there is none, and what the rehearsal and levers noted."""
        proof = [self.verdict.proof]
        notes = [f"note: {note}" for note in self.plan.notes]
        return "\n".join((lines + proof if self.verdict.proven else proof + lines) + notes)


class FittedSizes(Fitted):
    """A model whose steps fit at every size: a plan for each bucket of sizes. What `Fitted` has is of the largest."""

    def __init__(self, model: nn.Module, buckets: list[Bucket]) -> None:
        last = buckets[-1]
        super().__init__(Switched(Switching(model, buckets)), last.profile, last.plan, last.verdict)
        self.buckets = tuple(buckets)
        """Smallest first."""

    def __str__(self) -> str:
        return self._told([_in_a_line(bucket) for bucket in self.buckets])


def _in_a_line(bucket: Bucket) -> str:
    """`up to [8, 128]: 612 -> 480 MiB peak (budget 480 MiB), 212 ms -> 223 ms a step measured, ...`."""
    plan, verdict = bucket.plan, bucket.verdict
    time = _time(plan, verdict) if plan.decisions != Decisions() else ""
    return f"up to {bucket.size}: {_peak(plan, verdict)}{time}; {decisions(plan)}"


def _peak(plan: Plan, verdict: Verdict) -> str:
    """`14.9 -> 7.8 GiB peak (budget 8 GiB)`."""
    change = format_change(plan.plain.peak_bytes, verdict.measured_peak_bytes)
    return f"{change} peak (budget {format_bytes(plan.budget_bytes)})"


def _time(plan: Plan, verdict: Verdict) -> str:
    """`, 212 ms -> 223 ms a step measured, +4.1 % time predicted, bound +3.8 %`."""
    before = "" if verdict.plain_ms is None else f"{format_time(verdict.plain_ms)} -> "
    return f", {before}{format_time(verdict.planned_ms)} a step measured{extra_time(plan)}"


@held_back()
def fit(
    model: nn.Module,
    step: Callable[..., Any],
    batch: Any,
    *,
    budget: int | str,
    optimizer: Optimizers = None,
    profile: Profile | None = None,
    levers: Collection[str] = DEFAULT,
    offload: bool = False,
    shapes: Any = None,
    in_place: bool = True,
) -> Fitted:
    """Make `step(batch)` run within `budget` bytes at the least extra time, and prove it. The loop stays as it is.

    `step` takes the batch, or as many arguments as a batch that is a tuple or list has. `optimizer` may be a list.
    `budget` is bytes, `"8GiB"`, `"500MB"`, or `"60%"` of the plain step's peak; on a GPU also `"90% of gpu"`, or
    `"auto"`, which is what is free there less a margin for the allocator's pieces. It is for all memory of the step:
    parameters, gradients, optimizer state and batch included, and whatever else is in memory, such as other models.
    Optimizers of `model` that exist, `optimizer` among them, update it after each step that they don't step in; where
    there is none yet, that is noted, and what one makes later is said when it is there. `step(batch)` runs forward and
    backward of `model` (and the optimizer if it likes) and is run about ten times here, after which parameters,
    gradients, buffers, optimizer state and random numbers are as they were, and schedulers, gradient scalers, other
    modules, numbers, words and containers that its code refers to. What else these runs change, such as how far an
    iterator or a file is, the proof names. A `profile` from `rehearse` of the same step saves five of them.

    `levers` are changes of the step that may be made where they pay (`lowtide/levers`), and each that is tried takes
    some more steps: "outputs" (exact; by default), and, where you name them, "fused optimizer", "products apart",
    "loss head", "step in backward" and "micro-batches". With one that is not exact, the plan is compared bit by bit
    with the step that has the lever alone, and `verdict.relative_differences` says how far that is from the plain step.

    With `offload=True` saved tensors may also wait for backward in memory of the host, where that takes less time than
    making them again; not on a CPU.

    A model that `torch.compile` compiles as a whole with inductor is compiled anew under the plan, which then decides
    what its joint graphs save for backward; so is a compiled function of `step` that calls `model`. All that torch has
    compiled in the process is let go of for that.

    With `in_place=False` no gradient is written over the one that it is computed from, and no kernel is put where
    torch would look for it: nothing of torch's is changed then (docs/process.md).

    A batch that is larger than this one gets the most saving plan, and a warning that it may need more than the budget.
    With `shapes` smaller batches pay less or nothing: `batch` is the largest of the loop, and `shapes` a small one of
    the same form, or "auto" for its sequences (without any, its rows) cut to a quarter. Each bucket of sizes between
    the two has a plan and a proof of its own, which is some 30 steps; the result is a FittedSizes. No levers then, and
    no offloading.

    Returns with the plan applied to `model`. Raises Infeasible if no plan fits, with the smallest peak that one
    reaches; OverBudget if measured peaks stay above the budget; RehearsalError if the step can't be planned;
    ReplayMismatch if what is made again is never what it was, as where weights are written through `.data` between
    forward and backward; StalePlan for a `profile` of another model, batch or device; LowtideError if the model has
    a plan already (`lowtide.remove(model)` takes it off). Then nothing is applied.
    """
    check_has_no_plan(model)
    step = of_one_argument(step, batch)
    changes = looking_on(model, step, batch)
    fitted = _fit(model, step, batch, budget, optimizer, profile, levers, offload, in_place, shapes)
    fitted.verdict = replace(fitted.verdict, changes=changes())
    return fitted


def _fit(
    model: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    budget: int | str,
    optimizer: Optimizers,
    profile: Profile | None,
    levers: Collection[str],
    offload: bool,
    in_place: bool,
    shapes: Any,
) -> Fitted:
    check_budget(budget)
    budget = on_device(budget, place_of(model), tell)
    levers = (levers,) if isinstance(levers, str) else levers
    kinds = [named(name) for name in levers]
    if isinstance(shapes, str) and shapes != "auto":
        raise LowtideError(f'shapes is {shapes!r}; it takes "auto" or a batch that is smaller than the other.')
    if shapes is not None and (set(levers) - set(DEFAULT) or offload):
        raise LowtideError("shapes goes with neither levers nor offload: leave out the one or the other.")
    if offload and device_of(model) == "cpu":
        raise LowtideError("offload=True copies tensors from the device to the host, and this model is on the CPU.")
    if profile is None:
        profile = rehearse(model, step, batch, optimizer=optimizer, in_place=in_place)
    else:
        check_made_for(Profile.expect(profile, "fit(profile=...)").fingerprint, model, batch, what="profile")
        profile = profile if in_place else without_in_place(profile)
    if profile.graphs:
        levers = [name for name in levers if name not in DEFAULT]
        if set(levers) - {ProductsApart.name} or offload or shapes is not None:
            raise LowtideError(
                f"{type(model).__name__} is compiled as a whole, which goes with the lever {ProductsApart.name!r}, and "
                "with neither other levers, offload nor shapes: leave them out, or compile its repeated blocks "
                "instead (block.compile())."
            )
    if shapes is not None:
        sizes = Range(batch, None if isinstance(shapes, str) else shapes)
        return _fit_sizes(model, step, sizes, budget, optimizer, profile)
    if optimizer is None and any(kind.wants_optimizer for kind in kinds):
        optimizer = optimizer_of(model, step, batch)
    site = StepContext(model, step, batch, optimizer, in_place=profile.allows_in_place)
    choice, made = _first(site, profile, budget, levers, offload)
    budget_bytes, measured = made.budget_bytes, list[int]()
    while True:
        verdict = _proof(site, made)
        if not verdict.identical:
            raise RehearsalError(_not_identical(verdict, is_compiled=bool(choice.profile.graphs)))
        if verdict.within_budget:
            if measured and choice.profile.graphs:
                made = replace(made, notes=(*made.notes, f"{len(measured) + 1} plans were compiled and measured"))
            return Fitted(apply(model, made, optimizer=optimizer), choice.profile, made, verdict)
        measured.append(verdict.measured_peak_bytes)
        if len(measured) == (COMPILED_REPAIRS if choice.profile.graphs else REPAIRS):
            raise over_budget(choice.profile, budget_bytes, measured)
        if choice.profile.graphs:
            choice = replace(choice, profile=_measured(choice.profile, made, verdict, len(measured)))
            aim_bytes = budget_bytes
        else:
            aim_bytes = made.predicted.peak_bytes - (verdict.measured_peak_bytes - budget_bytes)
        try:
            made = _planned(choice, max(1, aim_bytes), budget_bytes, offload)
        except Infeasible:
            least = smallest_plan(choice.profile)
            if least.decisions == made.decisions or offload:
                raise over_budget(choice.profile, budget_bytes, measured) from None
            made = _own(choice, least, budget_bytes)


def _first(
    site: StepContext, profile: Profile, budget: int | str, levers: Collection[str], offload: bool
) -> tuple[Choice, Plan]:
    """The levers that pay, and the first plan. Raises Infeasible, which names further levers that may help."""
    plain = unplanned_step(profile)
    budget_bytes = parse_budget(budget, of=plain_peak_bytes(profile))
    if profile.levers:  # they were chosen before
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
            nearest=() if profile.graphs else advice(site, levers, choice.notes, error),
            notes=(*error.notes, *choice.notes.values()),
        ) from None


def _noticed(site: StepContext, profile: Profile) -> dict[str, str]:
    """Exact levers asked for that the step notices, as one that looks at gradients after backward may; and notes."""
    exact = [lever.name for lever in profile.levers if lever.exact and lever.name not in DEFAULT]
    if not exact:
        return {}
    verdict = verify(site.model, site.step, site.batch, plan(profile, "100%"), optimizer=site.optimizer)
    if verdict.identical:
        return {}
    why = f"there are other bits in the {listed(verdict.differing)} with it"
    return {name: f"lever {name!r} is not used: {why}" for name in exact}


def over_budget(
    made: Profile | Plan, budget_bytes: int, measured: Collection[int], nearest: Collection[str] = ()
) -> OverBudget:
    """What is raised when no plan keeps to the budget: `measured` are the peaks of those that were tried."""
    notes = made.notes if any(OTHER_WORK in note for note in made.notes) else (*made.notes, OTHER_WORK)
    plain_bytes = made.plain.peak_bytes if isinstance(made, Plan) else plain_peak_bytes(made)
    if min(measured) > plain_bytes:
        notes = (
            f"that is more than the plain step's {format_bytes(plain_bytes)}: this batch needs more than the rehearsed "
            "ones, as with lengths or rows that are in it, or something else was in memory, as the graph of a batch "
            "that was skipped before its backward (`lowtide watch` says what a script leaves there, and who holds it)",
            *notes,
        )
    return OverBudget(budget_bytes=budget_bytes, measured_peak_bytes=min(measured), nearest=nearest, notes=notes)


def _planned(choice: Choice, aim_bytes: int, budget_bytes: int, offload: bool) -> Plan:
    """The plan that aims at `aim_bytes` so that the measured peak is within the budget."""
    return _own(choice, plan(choice.profile, aim_bytes, offload=offload), budget_bytes)


def _measured(profile: Profile, made: Plan, verdict: Verdict, n: int) -> Profile:
    """`profile` with as much more in all its peaks as the compiled plan `made`, the `n`th, was measured to need.

    Plans that save less are further off: what the second needs beyond the first is counted once more for the third.
    """
    more = n * (verdict.measured_peak_bytes - made.predicted.peak_bytes)
    return replace(profile, static=replace(profile.static, margin=profile.static.margin + more))


def _own(choice: Choice, made: Plan, budget_bytes: int) -> Plan:
    """`made` as the plan for the budget, of the step as it is without levers."""
    return replace(made, budget_bytes=budget_bytes, plain=choice.plain, notes=(*made.notes, *choice.notes.values()))


def _proof(site: StepContext, made: Plan) -> Verdict:
    """Run the step under the plan, and without. Raises RehearsalError where the device has no room for the budget."""

    def no_room(said: str) -> RehearsalError:
        return RehearsalError(
            f"a step under a plan for {format_bytes(made.budget_bytes)} ran out of memory: {said}\n"
            "  A device has to hold more than the step: a CUDA context, the pieces between blocks of memory, and "
            "whatever else is on it. Give a smaller budget."
        )

    return unless_out_of_memory(
        lambda: verify(site.model, site.step, site.batch, made, optimizer=site.optimizer), no_room
    )


def _fit_sizes(
    model: nn.Module,
    step: Callable[[Any], Any],
    sizes: Range,
    budget: int | str,
    optimizer: Optimizers,
    profile: Profile,
) -> FittedSizes:
    def fit_one(batch: Any, budget_bytes: int, profile: Profile) -> tuple[Plan, Verdict]:
        with _fit(model, step, batch, budget_bytes, optimizer, profile, (), False, True, None) as fitted:
            return fitted.plan, fitted.verdict

    return FittedSizes(model, buckets_for(model, step, sizes, budget, fit_one, optimizer=optimizer, large=profile))


def _not_identical(verdict: Verdict, *, is_compiled: bool) -> str:
    differences = (verdict.differences or {}).items()
    found = {kind: names for kind, names in differences if names and kind not in verdict.nondeterministic}
    kinds = ", ".join(f"{kind} ({len(names)}, first {names[0]})" for kind, names in found.items())
    if is_compiled:
        return (
            f"under the plan compiled code gave other bits than without it: {kinds}. Where it computes again what it "
            "saved, inductor fuses other kernels, and these may round or add up in another order, as with autocast: "
            "no plan is put in force.\n  Give a larger budget, or compile the repeated blocks instead, each in its "
            "place: `for block in model.layers: block.compile()`."
        )
    return (
        f"under the plan the step gave other bits than without it: {kinds}. Plain steps from the same state did not "
        "differ there. If the step draws on something that a rehearsal can't put back (a clock, a file, numbers of its "
        "own), leave that out of it; if not, please report it."
    )
