"""Make a plan from a profile and a budget.

A simulator predicts the peak and the time of a step under given decisions (`simulate/`), and a solver searches for the
decisions that take least time within the budget (`solve/`). Gradients that backward can write over incoming gradients
are chosen before the search: `Profile.in_place` lists them, those without extra time first, and a plan uses the first
`n` entries. The search runs once for each such `n`, on a step that has these gradients in place, and the cheapest
result is the plan.

A plan also has a fallback for batches larger than the rehearsed ones: the decisions with the smallest peak.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

from lowtide.errors import Infeasible
from lowtide.planner.address_nodes import names_at
from lowtide.planner.inplace_savings import (
    collect_prefix_nodes,
    extra_ms,
    find_prefix_length,
    list_prefix_lengths,
    with_in_place,
)
from lowtide.planner.objectives import Objective, with_flops_costs
from lowtide.planner.records import Decided, Decisions, Plan, Prediction, Profile
from lowtide.planner.simulate.simulator import Simulator
from lowtide.planner.solve.ladder import Solver, minimize_peak, solve
from lowtide.planner.solve.lower_bound import lower_bound
from lowtide.utils.amounts import parse_budget

Allowed = Literal["all", "cheap"]


def plain_peak_bytes(profile: Profile) -> int:
    """Return the measured peak of the step without recomputes and replays; the predicted peak if the step was not
    measured.
    """
    measured = profile.measured_plain_peak_bytes
    return get_simulator(profile).predict(Decisions()).peak_bytes if measured is None else measured


def predict_in_place_peak(profile: Profile) -> int:
    """Return the predicted peak of the step that keeps every saved tensor, and writes gradients in place where that
    takes no extra time.
    """
    return get_simulator(profile, in_place=next(list_prefix_lengths(profile))).predict(Decisions()).peak_bytes


def plan(
    profile: Profile,
    budget: int | str,
    *,
    allow: Allowed = "all",
    minimize: Objective = "time",
    offload: bool = False,
    time_limit_s: float | None = None,
    solver: Solver = solve,
) -> Plan:
    """Decide the treatment of each saved tensor so that the step's peak is at most `budget`, at little extra time.

    A larger budget never gets a plan that takes longer, and the same budget always gets the same plan.

    Args:
        profile: The profile of the step, from `rehearse`. The plan has the levers that the profile was made with.
        budget: Bytes, text with a unit ("8GiB"), or a share of the plain step's peak ("60%"): of the measured peak if
            the profile has one, else of the predicted one.
        allow: "cheap" recomputes no matrix product, convolution or attention.
        minimize: "flops" looks for few FLOPs rather than little time, and computes no bound; FLOPs are the same on any
            machine, while times are those that the rehearsal measured.
        offload: Also copy tensors to host memory and back where that is cheaper; not on a CPU.
        time_limit_s: Seconds after which the search ends with the best plan found. Another run may find another plan.
            The search for the smallest peak has no limit.
        solver: Function that finds the decisions.

    Returns:
        The plan, with its predicted peak and time, the plain step's, and a lower bound on the time of any plan.

    Raises:
        BudgetError: If the budget is not an amount of memory.
        Infeasible: If no plan fits; the error has the smallest peak that was found.
        LowtideError: If the profile contradicts itself.

    Example:
        >>> import torch, lowtide
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> batch = torch.ones(128, 64)
        >>> def step(batch):
        ...     model(batch).square().mean().backward()
        >>> plan = lowtide.plan(lowtide.rehearse(model, step, batch), "90%")
        >>> plan.budget_bytes, plan.plain.peak_bytes, plan.predicted.peak_bytes
        (710330, 789256, 658184)
    """
    Profile.expect(profile, "plan")
    simulator = get_simulator(profile, offload=offload)
    unplanned, plain_bytes = predict_unplanned_step(profile), plain_peak_bytes(profile)
    budget_bytes = parse_budget(budget, plain_peak_bytes=plain_bytes)
    decisions, predicted, bound_ms = Decisions(), unplanned, 0.0
    if plain_bytes > budget_bytes:
        until = None if time_limit_s is None else time.monotonic() + time_limit_s
        make_simulator = functools.partial(get_simulator, profile, allow, offload=offload)
        decisions, bound_ms = _search(simulator, make_simulator, budget_bytes, minimize, solver, until)
        predicted = simulator.predict(decisions)
        assert predicted.peak_bytes <= budget_bytes or decisions == Decisions(), (
            "the solver's decisions are over the budget"
        )
    n_in_place = len(profile.in_place)
    smallest = minimize_peak(get_simulator(profile, allow, minimize, offload=offload, in_place=n_in_place))
    smallest = replace(smallest, in_place=frozenset(collect_prefix_nodes(profile, n_in_place)))
    fallback = with_free_recomputes(simulator, smallest)
    return Plan(
        **_make_decided_fields(profile, decisions),
        fingerprint=profile.fingerprint,
        budget_bytes=budget_bytes,
        predicted=with_lever_costs(profile, predicted),
        plain=unplanned,
        step_ms=profile.step_ms,
        bound_ms=bound_ms + _sum_levers_ms(profile),
        levers=profile.levers,
        input_shapes=profile.input_shapes,
        fallback=None
        if fallback == decisions or profile.graphs
        else Decided(**_make_decided_fields(profile, fallback)),
        ambiguous_addresses=tuple(
            sorted((decisions.recompute | fallback.recompute) & _find_ambiguous_addresses(profile))
        ),
        draws=profile.draws,
        implementations=profile.implementations,
        excluded_modules=profile.excluded_modules,
        allows_in_place=profile.allows_in_place,
        graphs=profile.graphs,
        notes=profile.notes,
    )


def _search(
    simulator: Simulator,
    make_simulator: Callable[..., Simulator],
    budget_bytes: int,
    minimize: Objective,
    solver: Solver,
    until: float | None,
) -> tuple[Decisions, float]:
    """Return the best decisions within the budget, and a lower bound on the time of any such decisions.

    Args:
        simulator: Simulator of all decisions, which predicts the results.
        make_simulator: Function that takes an objective and `in_place`, and returns the simulator to search with: only
            for allowed decisions, with costs in the objective's unit, and with the first `in_place` gradients in place.
        budget_bytes: The largest peak allowed.
        minimize: The cost by which results are compared.
        solver: Function that finds the decisions.
        until: Time on the monotonic clock at which the search ends.

    Raises:
        Infeasible: If no decisions fit, for any number of gradients in place.
    """
    profile = simulator.profile
    search = solver if solver is not solve else functools.partial(solve, until=until)
    results = {
        n: _solve_with_in_place(simulator, make_simulator(minimize, in_place=n), budget_bytes, n, search)
        for n in list_prefix_lengths(profile)
    }
    feasible = [result for result in results.values() if isinstance(result, Decisions)]
    if not feasible:
        errors = _collect_errors([*results.values()])
        results.clear()
        # the error reports the time of the smallest peak, and the costs in this profile are not times
        if minimize == "flops":
            solver(make_simulator(in_place=len(profile.in_place)), budget_bytes)
        raise errors.pop()
    decisions = min(feasible, key=lambda decisions: _cost(simulator.predict(decisions), minimize))
    if minimize == "flops":
        return decisions, 0.0
    return decisions, min(
        _compute_bound_ms(simulator, make_simulator(in_place=n), budget_bytes, n, results[n], until) for n in results
    )


def predict_unplanned_step(profile: Profile) -> Prediction:
    """Return the peak and time of the step without any plan.

    Both are predicted, except that the peak of compiled code is as measured: without a plan compiled code saves other
    tensors than the profile has.
    """
    plain = get_simulator(profile).predict(Decisions())
    if not profile.graphs:
        return plain
    return with_peak(plain, plain_peak_bytes(profile))


def with_lever_costs(profile: Profile, prediction: Prediction) -> Prediction:
    """Return `prediction` with the extra time of the profile's levers, which are the same under all decisions."""
    return replace(prediction, extra_ms=prediction.extra_ms + _sum_levers_ms(profile))


def _sum_levers_ms(profile: Profile) -> float:
    return sum(lever.extra_ms for lever in profile.levers)


def forecast_peak(profile: Profile, plan: Plan) -> int:
    """Return the peak that `profile` predicts for the decisions of `plan`."""
    return get_simulator(profile).predict(plan.decisions).peak_bytes


def with_peak(prediction: Prediction, peak_bytes: int) -> Prediction:
    """Return `prediction` with the measured `peak_bytes`; the difference is added to its part "temporaries"."""
    temporaries = prediction.parts["temporaries"] + peak_bytes - prediction.peak_bytes
    return replace(prediction, peak_bytes=peak_bytes, parts={**prediction.parts, "temporaries": temporaries})


def cheapest(profile: Profile, budget_bytes: int) -> Prediction:
    """Return the predicted peak and time under the cheapest decisions that fit a budget below the plain step's peak.

    Faster than `plan`, because no bound and no fallback are computed. Raises Infeasible if no plan fits.
    """
    simulator = get_simulator(profile)
    results = [
        _solve_with_in_place(simulator, get_simulator(profile, in_place=n), budget_bytes, n, solve)
        for n in list_prefix_lengths(profile)
    ]
    predictions = [simulator.predict(result) for result in results if isinstance(result, Decisions)]
    if not predictions:
        errors = _collect_errors(results)
        results.clear()
        raise errors.pop()
    predicted = min(predictions, key=lambda prediction: (prediction.extra_ms, prediction.extra_flops))
    return with_lever_costs(profile, predicted)


def find_smallest_plan(profile: Profile, minimize: Objective = "time") -> Plan:
    """Return the plan with the smallest peak at any cost. `minimize="flops"` computes no bound and needs no SciPy."""

    def search(allowed: Simulator, budget_bytes: int) -> Decisions:
        decisions = minimize_peak(allowed)
        if (predicted := allowed.predict(decisions)).peak_bytes > budget_bytes:
            raise Infeasible(budget_bytes=budget_bytes, smallest_peak_bytes=predicted.peak_bytes, parts=predicted.parts)
        return decisions

    return plan(profile, find_smallest_peak(profile, minimize)[1].peak_bytes, minimize=minimize, solver=search)


def recompute_arithmetic(profile: Profile) -> Plan:
    """Return the plan for compiled code that recomputes all results of arithmetic, and no extern kernel's result.

    The plan's predicted peak may be above the plain step's: values that one fused kernel recomputes are forecast as if
    each were written to memory.
    """
    cheap = get_simulator(profile, "cheap").profile
    arithmetic = {i for i, value in enumerate(cheap.values) if value.recipe and not value.refused}
    arithmetic -= {i for i in arithmetic if cheap.values[i].node == "getitem"}  # one result of several
    return _recompute_all(profile, arithmetic)


def recompute_products(profile: Profile) -> Plan:
    """Return the plan for compiled code that recomputes all matrix products, convolutions and attention, and no other
    slot.

    Its predicted peak may be far too high: an argument of a recomputed convolution, which backward reads too, is
    forecast twice.
    """
    values = enumerate(profile.values)
    return _recompute_all(profile, {i for i, v in values if v.recipe and v.expensive and not v.refused})


def _recompute_all(profile: Profile, values: Collection[int]) -> Plan:
    decisions = Decisions(recompute=frozenset(slot.address for slot in profile.slots if slot.value in values))
    predicted = get_simulator(profile).predict(decisions)
    return replace(
        find_smallest_plan(profile), **_make_decided_fields(profile, decisions), predicted=predicted, bound_ms=0.0
    )


def find_smallest_peak(
    profile: Profile, minimize: Objective = "time", *, offload: bool = False
) -> tuple[Decisions, Prediction]:
    """Return the decisions with the smallest peak that the search finds, and their prediction.

    `offload` also allows offloading to the host. `minimize` does not change the result; with the value given to `plan`,
    both functions share a cached simulator, and the search runs once.
    """
    n = len(profile.in_place)
    smallest = minimize_peak(get_simulator(profile, minimize=minimize, offload=offload, in_place=n))
    decisions = replace(smallest, in_place=frozenset(collect_prefix_nodes(profile, n)))
    return decisions, get_simulator(profile, offload=offload).predict(decisions)


def _solve_with_in_place(
    simulator: Simulator, allowed: Simulator, budget_bytes: int, n: int, search: Solver
) -> Decisions | Infeasible:
    """Return the decisions that `search` finds with the first `n` gradients in place, or the error if none fit.

    `simulator` simulates all decisions, `allowed` only the decisions that the search may use.
    """
    try:
        decisions = search(allowed, budget_bytes)
    except Infeasible as error:
        return error.with_traceback(None)
    return with_free_recomputes(
        simulator, replace(decisions, in_place=frozenset(collect_prefix_nodes(simulator.profile, n)))
    )


def _collect_errors(results: list[Decisions | Infeasible]) -> list[Infeasible]:
    """Return the errors among `results`.

    A function that raises one of these errors must have no variable that refers to it. Such a variable would close a
    reference cycle through the traceback. The cycle would keep the calling frames alive, and with them tensors in the
    training loop's frame.
    """
    return [result for result in results if isinstance(result, Infeasible)]


def _cost(predicted: Prediction, minimize: Objective) -> tuple[float, float]:
    costs = predicted.extra_ms, predicted.extra_flops
    return costs if minimize == "time" else costs[::-1]


def _compute_bound_ms(
    simulator: Simulator,
    allowed: Simulator,
    budget_bytes: int,
    n: int,
    result: Decisions | Infeasible,
    until: float | None,
) -> float:
    """Return a lower bound, in ms, on the extra time of plans that write just the first `n` gradients in place.

    `result` is the outcome of the search for this `n`. If the bound is close to the time of these decisions, or far
    below, it is not raised further.
    """
    own_ms = extra_ms(simulator.profile, n)
    known_ms = simulator.predict(result).extra_ms - own_ms if isinstance(result, Decisions) else math.inf
    return own_ms + lower_bound(allowed, budget_bytes, known_ms=known_ms, until=until)


def _make_decided_fields(profile: Profile, decisions: Decisions) -> dict[str, Any]:
    """Return `decisions` as fields of a `Decided` record: sorted, each address with the node that recomputes it."""
    recomputable_nodes = {index: value.node for index, value in enumerate(profile.values) if value.recipe}
    nodes = names_at(((slot.address, slot.value) for slot in profile.slots), recomputable_nodes)
    return {
        "recompute": {address: nodes[address] for address in sorted(decisions.recompute)},
        "replay": tuple(sorted(decisions.replay)),
        "advance": tuple(sorted(decisions.advance)),
        "offload": tuple(sorted(decisions.offload)),
        "in_place": collect_prefix_nodes(profile, find_prefix_length(profile, decisions.in_place)),
    }


def _find_ambiguous_addresses(profile: Profile) -> set[str]:
    """Return the slot addresses at which only some calls of the model can recompute the saved tensor.

    At such an address, different calls save outputs of different nodes, or some call saves a tensor without a recipe.
    """
    nodes: dict[str, set[str]] = {}
    for slot in profile.slots:
        value = profile.values[slot.value]
        nodes.setdefault(slot.address, set()).add(value.node if value.recipe is not None else "")
    without = {s.address for s in profile.slots if not s.is_input and profile.values[s.value].recipe is None}
    return without | {address for address, node_names in nodes.items() if len(node_names) > 1}


def with_free_recomputes(simulator: Simulator, decisions: Decisions) -> Decisions:
    """Add recomputes without cost and operands, unless they raise peak or time.

    An example is a saved tensor whose shape alone is read by backward. The solver has no reason to choose such
    recomputes. Without them the runtime keeps whole tensors, and other recomputes read these kept tensors instead of
    recomputed operands.
    """
    values = simulator.profile.values
    slots = [slot for slot in simulator.profile.slots if not slot.is_input and slot.storage is not None]
    free = {i for i, v in enumerate(values) if v.recipe and not (v.refused or v.operands or v.cost_ms)}
    others = {slot.address for slot in slots if slot.value not in free}
    more = replace(decisions, recompute=decisions.recompute | {slot.address for slot in slots} - others)
    before, after = simulator.predict(decisions), simulator.predict(more)
    return more if after.peak_bytes <= before.peak_bytes and after.extra_ms <= before.extra_ms else decisions


_RECENT: list[tuple[Profile, Allowed, Objective, bool, int, Simulator]] = []
"""Arguments and results of the last few calls of `get_simulator`."""


def get_simulator(
    profile: Profile,
    allow: Allowed = "all",
    minimize: Objective = "time",
    *,
    offload: bool = False,
    in_place: int = 0,
) -> Simulator:
    """Return a simulator of the allowed decisions about `profile`, for a step with the first `in_place` gradients in
    place.

    The last few simulators are cached, because solvers keep their results on the simulator.
    """
    offload = offload and profile.offload_bytes_per_ms is not None
    for known, *settings, simulator in _RECENT:
        if known is profile and settings == [allow, minimize, offload, in_place]:
            return simulator
    usable = profile if offload else replace(profile, offload_bytes_per_ms=None)
    usable = usable if allow == "all" else without_expensive(usable)
    usable = usable if minimize == "time" else with_flops_costs(usable)
    simulator = Simulator(with_in_place(usable, in_place) if in_place else usable)
    _RECENT.append((profile, allow, minimize, offload, in_place, simulator))
    del _RECENT[:-8]
    return simulator


def without_expensive(profile: Profile) -> Profile:
    """Return `profile` without expensive recomputes, recomputes that run an expensive one, and replays that cost FLOPs.

    A decision is for all tensors at an address, or for all calls with an id: if one tensor or call is expensive, the
    decision is refused for all. Predictions for the remaining decisions stay the same.
    """
    read = {slot.value for slot in profile.slots if not slot.is_input}
    values_at: dict[str, set[int]] = {}
    for slot in profile.slots:
        values_at.setdefault(slot.address, set()).add(slot.value)
    refused = {index for index, value in enumerate(profile.values) if value.expensive}
    known = -1
    while known < len(refused):
        known = len(refused)
        # an operand that no slot saves is recomputed together with the value that needs it
        refused |= {i for i, value in enumerate(profile.values) if any(n in refused - read for n in value.operands)}
        refused.update(*(values for values in values_at.values() if values & refused))
    costly = {call.id for call in profile.calls if call.flops}
    advance_costly = {call.id for call in profile.calls if call.advance_flops}
    why = 'expensive, and allow="cheap"'
    return replace(
        profile,
        values=tuple(replace(v, refused=v.refused or why) if i in refused else v for i, v in enumerate(profile.values)),
        calls=tuple(
            replace(
                call,
                refused=call.refused or why if call.id in costly else call.refused,
                result_value=None if call.id in advance_costly else call.result_value,
            )
            for call in profile.calls
        ),
    )
