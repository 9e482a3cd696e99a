"""Plans of the model that a loop trains: made from its rehearsal, put in force, and replaced if one is over the budget.

A plan for compiled code has to pass two checks before it is in force: that inductor schedules its code within the
budget, and that the code computes the same bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from lowtide.api.apply import Applied
from lowtide.api.compiled_fit import COMPILED_REPAIRS, as_measured
from lowtide.api.differing_bits import REFUSED, with_kept
from lowtide.api.plan_attempts import FORECAST_PEAK, REPAIRS, describe_more_in_memory, plan_by_forecast, with_excess
from lowtide.errors import Infeasible, LowtideError
from lowtide.memory.lbfgs_history import predict_coming_history
from lowtide.planner import plan
from lowtide.planner.planning import find_smallest_plan, forecast_peak
from lowtide.profiler.compiled_bits import compiled_bits
from lowtide.profiler.other_memory import NOTEWORTHY
from lowtide.profiler.training_step import NOT_RUN
from lowtide.report.text_table import decisions, format_added_time, format_lever_lines, listed
from lowtide.runtime.fingerprint import check_made_for, find_device, fingerprint
from lowtide.runtime.live_optimizers import find_optimizers
from lowtide.script.compiled_checks import CompiledChecks, build_other_bits_error, find_addresses_with_other_bits
from lowtide.script.larger_batches import LargerBatches
from lowtide.script.later_steps import LaterSteps
from lowtide.script.post_plan_monitor import N_TIMED, N_UNTIMED
from lowtide.script.rehearse_steps import StepRehearser
from lowtide.script.run_verdict import NOT_COPIED, RunVerdict
from lowtide.script.unlike_steps import UnlikeSteps
from lowtide.units import format_bytes, format_change
from lowtide.utils.progress import Stage

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.planner.records import Plan, Profile, Static
    from lowtide.runtime.guards import Changed
    from lowtide.runtime.known_calls import KnownCalls
    from lowtide.script.fit_request import FitRequest
    from lowtide.script.plan_monitor import InForce, Repeats
    from lowtide.state.step_outcome import Outcome

WHOLE_NEXT: Final = "That was inside compiled blocks: they are rehearsed again, to be replayed as a whole"
FIT_SUCH: Final = "To plan for them, give such a step to lowtide.fit; or give a smaller budget"
SMALLEST_FOR_LARGER: Final = "The plan with the smallest peak is in force for these batches"


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step that begins, at its first call of the model."""

    model: nn.Module
    batch: Any
    """Arguments of the call, (args, kwargs)."""
    optimizers: tuple[Optimizer, ...]
    code: Callable[..., Any]
    """The function that the program calls: the model, or a compiled function around it."""


class AppliedPlans(Applied):
    """Plans in force on a model, and their rehearsal, which lives as long as the model."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[Plan],
        say: Callable[[str], None],
        outgrown: Callable[[str], bool],
        changed: Changed,
        rehearsing: StepRehearser,
        calls: KnownCalls,
    ) -> None:
        super().__init__(model, plans, None, say, outgrown, changed, calls)
        self.rehearsing = rehearsing
        self.profile = rehearsing.profile
        """The profile that the plan for the largest batches was made from."""


class ModelPlans:
    """The plans of one model for one budget. They are made from the model's rehearsal, checked, put in force and
    replaced.
    """

    def __init__(
        self,
        request: FitRequest,
        rehearsing: StepRehearser,
        in_force: InForce,
        repeats: Repeats,
        calls: KnownCalls,
        say: Callable[[str], None],
    ) -> None:
        """Begin without a plan; `calls` holds the calls of the rehearsed steps."""
        self.name: str | None = None
        """The class of the model."""
        self.plan: Plan | None = None
        """The plan for the largest batches so far."""
        self.smaller: list[Plan] = []
        """Plans for smaller batches than those of `plan`, the smallest first."""
        self.verdict: RunVerdict | None = None
        """The verdict on `plan`; None until the plan was kept after measured steps."""
        self.unplanned: str | None = None
        """The reason why training continues without a plan."""
        self.rehearsing = rehearsing
        self.checks = CompiledChecks(say)
        self.larger, self.later = LargerBatches(), LaterSteps()
        self.unlike = UnlikeSteps(calls, request.budget_for, say)
        calls.noticed, calls.noticed_backward = self._on_unlike_call, self._on_unlike_backward
        calls.begins_between, calls.ends_between = self._on_between_begin, self._on_between_end
        self.counts_coming = True
        """False if the plan does not count the part of L-BFGS's history that is to come."""
        self.preceding: Counter[str] = Counter()
        """Counts, by name, of models called between steps."""
        self.over: list[int] = []
        """Measured peaks in bytes of plans that were over the budget."""
        self._place = torch.device("cpu")
        self._request, self._in_force, self._repeats, self._say = request, in_force, repeats, say

    @property
    def all(self) -> tuple[Plan, ...]:
        """All plans, the one for the smallest batches first."""
        return (*self.smaller, *([] if self.plan is None else [self.plan]))

    @property
    def profile(self) -> Profile | None:
        """The profile of the rehearsed step; None while there is none, and once the plan is final."""
        return self.rehearsing.profile

    # --- made from the rehearsal

    def make(self, profile: Profile, model: nn.Module) -> None:
        """Make the first plan, from `profile`; if none fits, react as the request's `on_infeasible` says.

        Raises Infeasible if that is the reaction.
        """
        self._say(f"rehearsed {self.name} in {self.rehearsing.n_steps} steps")
        self.rehearsing.tell_kinds(self.unlike.calls)
        budget = self._request.budget
        try:
            with Stage("planning"):
                first = plan_by_forecast(profile, budget) if profile.graphs else plan(profile, budget)
        except Infeasible as why:
            first = replace(find_smallest_plan(profile), budget_bytes=why.budget_bytes)
            history_bytes, note = predict_coming_history(find_optimizers(model))
            if history_bytes and first.predicted.peak_bytes - history_bytes <= why.budget_bytes:
                self.counts_coming = False
                static = replace(profile.static, optimizer=profile.static.optimizer - history_bytes)
                notes = tuple(each for each in profile.notes if each != note)
                self.rehearsing.profile = profile = replace(profile, static=static, notes=notes)
                first = replace(find_smallest_plan(profile), budget_bytes=why.budget_bytes)
                room_bytes = why.budget_bytes - first.predicted.peak_bytes
                self._say(
                    f"{format_first_line(why)} The plan with the smallest peak is in force: it keeps the budget until "
                    f"the history of L-BFGS has grown by {format_bytes(room_bytes)} of {format_bytes(history_bytes)}"
                )
            elif not self._react_to_infeasible(_offer_short_history(why, history_bytes), model):
                return
        self.plan = replace(first, budget_for=self._request.budget_for)
        self.announce(self.plan)

    def plan_lower(self, current: Plan, measured_bytes: int, added_bytes: int) -> bool:
        """Replace `current`, whose measured peak is over the budget, by a plan with a lower peak.

        Returns False if no plan has a lower peak, or if no more plans may be measured; the last one is always the plan
        with the smallest peak. `added_bytes` are the bytes in memory at the start of the measured step beyond those
        at the start of the rehearsed step.
        """
        profile, over_bytes = self.profile, measured_bytes - current.budget_bytes
        assert profile is not None
        if (n_left := (COMPILED_REPAIRS if current.graphs else REPAIRS) - len(self.over)) < 1:
            return False
        aim_bytes = current.predicted.peak_bytes - over_bytes
        if current.graphs:
            aim_bytes = current.budget_bytes
            excess_bytes = measured_bytes - forecast_peak(profile, current)
            self.rehearsing.profile = profile = with_excess(profile, excess_bytes)
            self.checks.excess_bytes += max(0, measured_bytes - current.predicted.peak_bytes)
        try:
            lower = find_smallest_plan(profile) if n_left == 1 else plan(profile, max(1, aim_bytes))
        except Infeasible:
            lower = find_smallest_plan(profile)
        if lower.decisions == current.decisions:
            return False
        why = f": {describe_more_in_memory(added_bytes)};" if added_bytes > 0 else ":"
        measured, over = format_bytes(measured_bytes), format_bytes(over_bytes)
        self._say(f"measured {measured} peak, {over} over the budget{why} planning again")
        self.plan = replace(lower, budget_bytes=current.budget_bytes, budget_for=current.budget_for)
        return True

    def added_bytes(self, static: Static) -> int:
        """Return the bytes by which `static`, the memory before a step, exceeds the memory before the rehearsed step; 0
        if the difference is small.
        """
        if self.profile is None:
            return 0
        before_bytes = self.profile.static.total
        return more if (more := static.total - before_bytes) >= NOTEWORTHY * before_bytes else 0

    def plan_or_smallest(self, profile: Profile, current: Plan, otherwise: str) -> Plan:
        """Return a plan for the budget of `current`; if none fits, report `otherwise` and return the plan with the
        smallest peak.
        """
        try:
            following = plan(profile, current.budget_bytes)
        except Infeasible as why:
            following = find_smallest_plan(profile)
            self._say(f"{format_first_line(why)} {otherwise}")
        return replace(following, budget_bytes=current.budget_bytes, budget_for=current.budget_for)

    def announce(self, plan: Plan) -> None:
        """Report a plan that will be in force, once the checks of compiled code, if any, are passed."""
        is_tried = self.checks.must_compare(plan)
        when = "tried in the next step" if is_tried else "in force from the next step on"
        change = format_change(plan.plain.peak_bytes, plan.predicted.peak_bytes)
        peak = FORECAST_PEAK if is_tried else "peak predicted"
        self._say(
            f"{self.name}: {change} {peak} (budget {format_bytes(plan.budget_bytes)}), "
            f"{format_added_time(plan.predicted.extra_ms, plan.step_ms)}{self._when_timed(plan)}; {when}"
        )
        decided = () if is_tried else (decisions(plan),)  # another plan may be chosen
        for line in (*decided, *format_lever_lines(plan)):
            self._say(line)
        if self.smaller:
            return
        for name in [name for name, n in self.preceding.items() if n > 1]:
            another = "another " * (name in re.split(", | and ", str(self.name)))
            self._say(
                f"note: {another}{name} is called before the model in each step, and memory that it takes until then "
                "is not counted: lowtide.fit counts it"
            )
        for note in plan.notes:
            if note != NOT_RUN:
                self._say(f"note: {note}")

    def _when_timed(self, plan: Plan) -> str:
        """Return text that says when the share of the plan's extra time will be known; empty text if the share is
        known.
        """
        if plan.step_ms or not plan.predicted.extra_ms:
            return ""
        return f" (its share follows {N_UNTIMED + N_TIMED} steps after the measured one)"

    # --- without a plan that fits

    def _react_to_infeasible(self, why: Infeasible, model: nn.Module) -> bool:
        """Rehearse compiled blocks again, continue without a plan, or raise the error `why`, as the request says.

        Return True if the request accepts the plan with the smallest peak instead, which is above the budget.
        """
        if self.profile is not None and self.profile.graphs and self.replay_blocks_whole(why, model):
            return False
        if self._request.ends_training:
            raise why
        if self._request.on_infeasible == "plain":
            self.go_on_plain(why)
            return False
        opening = "As asked, the" if self._request.on_infeasible == "smallest" else "The"
        self._say(f"{format_first_line(why)} {opening} plan with the smallest peak is in force, above the budget")
        return True

    def replay_blocks_whole(self, why: LowtideError, model: nn.Module) -> bool:
        """Drop the plan, for the reason `why`, and rehearse compiled blocks again, to be replayed as a whole.

        Return False, and change nothing, if that is not possible.
        """
        if not self.rehearsing.replay_blocks_whole(model):
            return False
        self._say(f"{format_first_line(why)} {WHOLE_NEXT}")
        self.plan = None
        return True

    def go_on_plain(self, why: LowtideError) -> None:
        """Continue without a plan, and report the error `why` as the reason."""
        self.plan, self.unplanned = None, format_first_line(why)
        asked = ", as asked" if self._request.on_infeasible == "plain" else ""
        self._say(f"{self.unplanned} Training continues without a plan{asked}")

    # --- in force

    def put_in_force(self, step: BegunStep) -> Plan | None:
        """Put the current plans in force on the step's model, unless they are in force already.

        Code that was compiled for the plan is compared with the plain code on the step's batch. Returns the plan that
        is then in force, if any.
        """
        assert self.plan is not None
        if self._in_force.applied is not None and self._in_force.applied.plan is self.plan:
            self.rehearsing.on_stop()
            return self.plan
        self._in_force.remove()
        if not self.checks.must_compare(self.plan):
            self.rehearsing.on_stop()
            self._force(self.plan, step.model)
            return self.plan
        is_planned = fingerprint(step.model, step.batch).batch == self.plan.fingerprint.batch
        if (trial := self.rehearsing.make_trial_call(step.model, step.code, step.batch)) is None:
            self.rehearsing.on_stop()
            self._force(self.plan, step.model)
            self.checks.proof, self.checks.compared = NOT_COPIED, self.plan
        else:
            self._try_compiled(self.plan, replace(step, code=trial[0], batch=trial[1]), is_planned=is_planned)
        if self.plan is not None:
            self._say(decisions(self.plan))
        return self.plan

    def _try_compiled(self, plan: Plan, step: BegunStep, *, is_planned: bool) -> None:
        """Put a plan for compiled code in force, after checking its memory and bits on the call that `step` holds.

        Memory is checked only if the batch has the planned size (`is_planned`).
        """
        plain = compiled_bits(step.model, step.code, step.batch)  # the rehearsal still has torch's own partition
        self.rehearsing.on_stop()
        if is_planned and not self._schedule(plan, step):
            return
        assert self.plan is not None
        self._force(self.plan, step.model)
        kinds = self._compare(self.plan, plain, step)
        if kinds and plain is not None and (following := self._with_kept(self.plan, step, plain)):
            self._force(following, step.model)
            kinds = self._compare(following, plain, step)
        if kinds and self.plan is not None:
            self._refuse(kinds, step.model)

    def _force(self, plan: Plan, model: nn.Module) -> None:
        """Put `plan` in force on `model` for the largest batches, next to the plans for smaller ones."""
        self.plan, self._place = plan, find_device(model)
        if not self.later.has_begun:  # else the plan may stay on a model that has changed
            check_made_for(plan.fingerprint, model)
        if self._request.budget_for == "reserved":
            torch.cuda.empty_cache()  # returns segments of rehearsed steps to the device
        told = self._say, self._rehearse_larger, self.changed
        applied = AppliedPlans(model, self.all, *told, self.rehearsing, self.unlike.calls)
        self._in_force.applied = applied
        self._repeats.guard(model, applied)

    def _schedule(self, plan: Plan, step: BegunStep) -> bool:
        """Replace a plan for compiled code by the cheapest of a few whose code inductor schedules within the budget.

        Returns False if none is within the budget and the request accepts no plan above it. Raises Infeasible if that
        is to end training.
        """
        best, why = self.checks.scheduled(plan, self.rehearsing, step.model, step.code, step.batch)
        if why is not None:
            if self.later.has_begun:
                self._say(f"{format_first_line(why)} {SMALLEST_FOR_LARGER}")
            elif not self._react_to_infeasible(why, step.model):
                return False
        self.plan = best
        return True

    def _compare(self, plan: Plan, plain: Outcome | None, step: BegunStep) -> dict[str, tuple[str, ...]]:
        return self.checks.compare(plan, plain, step.model, step.code, step.batch)

    def _with_kept(self, plan: Plan, step: BegunStep, plain: Outcome) -> Plan | None:
        """Return a plan that keeps the values whose recomputation makes results differ from `plain`, if one fits."""
        profile = self.profile
        if self._in_force.applied is None or profile is None or not plan.recompute:
            return None
        self._in_force.remove()
        kept = find_addresses_with_other_bits(plan, plain, step.model, step.code, step.batch)
        self.rehearsing.profile = profile = with_kept(profile, kept)
        try:
            following = plan_by_forecast(profile, plan.budget_bytes)
            self.plan = replace(following, budget_for=plan.budget_for)
            if not self._schedule(self.plan, step):
                return None
        except Infeasible as why:
            self._say(format_first_line(why))
            return None
        self._say(f"kept: {listed(kept)} ({REFUSED})")
        return self.plan

    def _refuse(self, kinds: dict[str, tuple[str, ...]], model: nn.Module) -> None:
        """Remove a plan under which the results named in `kinds` have other bits than without a plan.

        Compiled blocks are then rehearsed again, or training continues without a plan. Raises RehearsalError if neither
        is possible.
        """
        why = build_other_bits_error(kinds)
        self._in_force.remove()
        if self.replay_blocks_whole(why, model):
            self.checks = CompiledChecks(self._say)
        elif self._request.on_infeasible == "plain" or self._request.is_for_next:
            self.go_on_plain(why)
        else:
            raise why

    def release(self) -> None:
        """Drop the references to the model and its rehearsal; the plans stay in force, and hold the rehearsal."""
        if self._in_force.applied is not None:
            self.rehearsing.restart()  # frees the recording
        self._in_force.release()
        self.rehearsing = StepRehearser()

    def resume(self) -> bool:
        """Prepare to observe more steps, for larger batches or after changes; return False if the model was freed."""
        applied = self._in_force.resume()
        if not isinstance(applied, AppliedPlans):
            return False
        self.rehearsing = applied.rehearsing
        if self.larger.is_outgrown:
            self.larger.is_outgrown = False
            self.larger.await_next()
        else:
            self.rehearsing.profile = applied.profile
            self.later.begin()
        return True

    # --- measured

    def hold(self, plan: Plan, measured_bytes: int | None, *, is_of_planned_size: bool) -> None:
        """Keep `plan` in force, set its verdict, and schedule measurements of later steps."""
        self.verdict = RunVerdict(
            budget_bytes=plan.budget_bytes,
            predicted_peak_bytes=plan.predicted.peak_bytes,
            measured_peak_bytes=measured_bytes,
            budget_for=self._request.budget_for,
            is_of_planned_size=is_of_planned_size,
            proof=self.checks.proof,
        )
        # memory left over from the previous step, such as a graph, depends on the plan that was in force in that step
        static = None if self.profile is None else self.profile.static
        leaves_some = static is not None and static.carried_over >= NOTEWORTHY * static.total
        room_bytes = plan.budget_bytes - (measured_bytes or plan.predicted.peak_bytes)
        self.later.plan_holds(self._place, room_bytes, is_sure=not leaves_some)

    def take_measured(self, plan: Plan, measured_bytes: int) -> Plan:
        """Replace the forecast peak of `plan`, which is for compiled code, by the measured one; return the new plan."""
        assert self._in_force.applied is not None
        self.plan = self.checks.compared = self._in_force.applied.plan = plan = as_measured(plan, measured_bytes)
        return plan

    def _rehearse_larger(self, what: str) -> bool:
        """Rehearse the next batch that is larger than all planned batches, because a first one has already run.

        `what` describes the batch in words. Return False if it can't get another plan.
        """
        assert self.plan is not None
        if not self.larger.can_be_planned(self.plan):
            return False
        self._say(
            f"{self.name} {what}: the peak may be above the budget, though larger batches run under the plan "
            "with the smallest peak. The next one is rehearsed, for a separate plan"
        )
        self.larger.is_outgrown = True
        return True

    def _on_unlike_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> None:
        """Count a step that calls `model` in another form than the rehearsed steps, and measure the first step of each
        form.

        `KnownCalls` calls this method at such a call, with its arguments; `what` describes the difference in words.
        """
        applied = self._in_force.held()
        n_updates, with_coming = self.later.n_updates, self.counts_coming
        self.unlike.begin(applied, model, (args, kwargs), what, n_updates=n_updates, with_coming=with_coming)
        if self.unlike.end_count_if_many(self.later.n_updates):
            self.changed("model", "is often called unlike in the rehearsed steps")

    def _on_between_begin(self, model: nn.Module) -> None:
        """Begin to record memory between two steps, in which `model` is called without training, for example in a
        rollout.
        """
        self.unlike.begin_between(self._in_force.held(), model, with_coming=self.counts_coming)

    def _on_between_end(self, n_calls: int) -> None:
        """Compare the memory recorded between two steps with the budget. The model was called `n_calls` times without
        training.
        """
        if self.plan is not None:
            self.unlike.end_between(n_calls, self.plan.budget_bytes)

    def _on_unlike_backward(self, what: str) -> None:
        """Schedule measurements of the next steps, because a backward pass differed from the measured steps, as `what`
        says.
        """
        if self.plan is not None and self.later.can_rehearse(self.plan):
            self.unlike.notice_backward(what, self.later)

    def end_unlike(self) -> None:
        """End the measured step that differed from the rehearsed steps, and report its peak."""
        step, self.unlike.open = self.unlike.open, None
        assert step is not None
        self.judge_unlike(step.peak_bytes())

    def judge_unlike(self, measured_bytes: int) -> None:
        """Report the measured peak of a step that differed from the rehearsed steps, if no such step had a larger
        peak.
        """
        assert self.plan is not None
        over_bytes = measured_bytes - self.plan.budget_bytes
        if not self.unlike.record_peak(measured_bytes):
            return
        if over_bytes <= 0:
            self._say(f"measured {format_bytes(measured_bytes)} peak in such a step: within the budget")
            return
        self._say(
            f"measured {format_bytes(measured_bytes)} peak in such a step, {format_bytes(over_bytes)} over the budget: "
            f"no smaller plan is known for it. {FIT_SUCH}"
        )
        if self.verdict is not None:
            self.verdict = replace(self.verdict, measured_peak_bytes=measured_bytes)

    def changed(self, kind: Literal["model", "step", "state"], what: str) -> bool:
        """Schedule a measurement because the model, a step or the optimizer state (`kind`) has changed, as `what` says.

        Return True if changed steps can get another plan.
        """
        assert self.plan is not None
        if not self.later.can_rehearse(self.plan):
            return False
        self.later.come_soon()
        self.later.is_different |= kind == "step"
        self.later.has_more_state |= kind == "state"
        self.later.is_changed |= kind == "model"
        if kind == "model":
            self._say(f"{self.name} {what}: the peak may be above the budget until it is rehearsed again")
        return True


def _offer_short_history(why: Infeasible, history_bytes: int) -> Infeasible:
    """Return `why`, offering also the budget without the `history_bytes` that L-BFGS does not hold yet."""
    if not history_bytes:
        return why
    short = format_bytes(why.smallest_peak_bytes - history_bytes, round_up=True)
    added = f"what L-BFGS adds to its history in this run (up to {format_bytes(history_bytes)})"
    return why.with_advice(nearest=(f"{short} and {added}",))


def format_first_line(why: LowtideError) -> str:
    """Return the first line of the error's text, as a sentence."""
    text = str(why).partition("\n")[0]
    return f"{text[0].upper()}{text[1:]}"
