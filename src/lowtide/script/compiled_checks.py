"""Checks of compiled code under a plan: the memory that its schedule takes, and its bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lowtide._torch.compiled_code import n_compiled
from lowtide._torch.inductor import always_partitioned, kernels_left_out
from lowtide.api.apply import apply
from lowtide.api.compiled_fit import SCHEDULED, build_compiled_infeasible, find_cheapest_within
from lowtide.api.differing_bits import find_differing_addresses
from lowtide.errors import Infeasible, RehearsalError
from lowtide.levers.selection import Choice
from lowtide.profiler.compiled_bits import compiled_bits, record_scheduled_calls
from lowtide.profiler.online import PATIENCE
from lowtide.report.text_table import listed
from lowtide.runtime.fingerprint import find_device
from lowtide.script.run_verdict import AUDITED, COMPARED, NOT_COMPARED
from lowtide.state.step_outcome import find_varying_results, without
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from lowtide.planner.records import Plan
    from lowtide.script.rehearse_steps import StepRehearser
    from lowtide.state.step_outcome import Outcome


class CompiledChecks:
    """Checks of one model's plans for compiled code: each plan has to pass them before it is in force or measured."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.proof = AUDITED
        """Result of comparing the bits, in words."""
        self.compared: Plan | None = None
        """Plan under which compiled code was compared last."""
        self.excess_bytes = 0
        """Bytes by which measured peaks of steps exceed those of scheduled code."""
        self._say = say
        self._n_compiled = 0
        """Number of graphs that torch.compile had compiled when the measured step began."""
        self._n_compiling = 0
        """Number of steps under the plan in which code was compiled."""

    def begin_step(self) -> None:
        """Record how many graphs are compiled so far, when a measured step begins."""
        self._n_compiled = n_compiled()

    def end_step(self, plan: Plan) -> bool:
        """Count the measured step if it compiled code under `plan`; return True if the step's peak can be judged.

        The peak can be judged if the step compiled nothing, or is the `PATIENCE`-th step that compiled code.
        """
        is_compiling = bool(plan.graphs) and n_compiled() != self._n_compiled
        self._n_compiling += is_compiling
        return not is_compiling or self._n_compiling >= PATIENCE

    def must_compare(self, plan: Plan) -> bool:
        """Return True if the code compiled under `plan` differs from the plain code, and was not compared with the
        plain code yet.
        """
        return bool(plan.graphs) and plan.predicted != plan.plain and self.compared is not plan

    def scheduled(
        self, plan: Plan, rehearsing: StepRehearser, model: nn.Module, code: Callable[..., Any], batch: Any
    ) -> tuple[Plan, Infeasible | None]:
        """Return the cheapest of a few plans whose code inductor schedules within the budget.

        Such a plan's memory is recorded while compiled code runs without its kernels, which is possible only on a CPU;
        elsewhere `plan` is returned. If all plans are over the budget, the plan with the smallest peak is returned with
        the error. `batch` has the planned size.
        """
        profile = rehearsing.profile
        if profile is None or plan.budget_for == "reserved" or find_device(model).type != "cpu":
            return plan, None

        def peak_of(tried: Plan) -> int | None:
            with kernels_left_out(), always_partitioned(), apply(model, tried, say=lambda what: None):
                peak_bytes = rehearsing.predict_peak_with(partial(record_scheduled_calls, model, code, batch))
            return None if peak_bytes is None else peak_bytes + self.excess_bytes

        choice = Choice(profile, plan.plain)
        n_scheduled, best = find_cheapest_within(choice, plan, peak_of, SCHEDULED, tries_one_kind=True)
        if best is None:
            return plan, None
        peak_bytes = best.predicted.peak_bytes
        plans = "one plan" if n_scheduled == 1 else f"{n_scheduled} plans"
        self._say(f"inductor scheduled {plans} without kernels: {format_bytes(peak_bytes)} peak")
        if peak_bytes <= plan.budget_bytes:
            return best, None
        tried = f"plans that were scheduled by inductor and measured: {n_scheduled}"
        return best, build_compiled_infeasible(choice, best, tried)

    def compare(
        self, plan: Plan, plain: Outcome | None, model: nn.Module, code: Callable[..., Any], batch: Any
    ) -> dict[str, tuple[str, ...]]:
        """Compare compiled code under the plan with `plain`, a run without a plan. Return the names of results whose
        bits differ, by kind.
        """
        self.compared = plan
        comparison = None if plain is None else _compare_runs(plain, model, code, batch)
        if comparison is None:
            self.proof = NOT_COMPARED
            return {}
        differing, varying = comparison
        self.proof = f"{COMPARED}; it is not deterministic in its {listed(varying)}" if varying else COMPARED
        return differing


def _compare_runs(
    plain: Outcome, model: nn.Module, code: Callable[..., Any], batch: Any
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]] | None:
    """Compare a run of compiled code with `plain`, a run without a plan; return None if memory is too small for the
    run.

    Results that differ between repetitions of the run can't be compared, nor can results computed from them. The cause
    is not the plan, which adds no kernel whose order varies. On a CPU, for example, several threads add up an
    embedding's gradient by atomic additions.

    Returns:
        The names of the other results whose bits differ from `plain`, by kind; and the kinds with results that differ
        from `plain` and can't be compared.
    """
    if (first := compiled_bits(model, code, batch)) is None:
        return None
    differences = plain.differences(first)
    varying = find_varying_results(first, differences, lambda: compiled_bits(model, code, batch))
    return without(differences, varying), tuple(varying)


def find_addresses_with_other_bits(
    plan: Plan, plain: Outcome, model: nn.Module, code: Callable[..., Any], batch: Any
) -> tuple[str, ...]:
    """Find, by a few trials, the addresses of recomputed values that make results under `plan` differ from `plain`."""

    def is_identical(addresses: tuple[str, ...]) -> bool:
        recompute = {address: plan.recompute[address] for address in addresses}
        with apply(model, replace(plan, recompute=recompute), say=lambda what: None):
            comparison = _compare_runs(plain, model, code, batch)
        return comparison is not None and not comparison[0]

    return find_differing_addresses(tuple(plan.recompute), is_identical)


def build_other_bits_error(kinds: dict[str, tuple[str, ...]]) -> RehearsalError:
    """Build the error for compiled code whose results differ under the plan: `kinds` has their names by kind."""
    kind, names = next(iter(kinds.items()))
    return RehearsalError(
        f"under the plan the results of compiled code differ in bits: {kind} ({len(names)}, first {names[0]}). "
        "Where saved tensors are recomputed, inductor fuses other kernels, which may round or add in another "
        "order.\n  Give a larger budget, or compile the repeated blocks instead, each in place: `for "
        "block in model.layers: block.compile()`."
    )
