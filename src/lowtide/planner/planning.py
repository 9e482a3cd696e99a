"""From a profile and a budget to a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from lowtide.errors import Infeasible
from lowtide.planner.indexed import Index
from lowtide.planner.predict import Simulator
from lowtide.planner.records import Decisions, Plan, Profile
from lowtide.planner.solve import Solver, infeasible, solve_greedily
from lowtide.units import parse_budget


def plan(
    profile: Profile, budget: int | str, *, allow: Literal["all", "cheap"] = "all", solver: Solver = solve_greedily
) -> Plan:
    """What to do with each saved tensor so that the step's peak is at most `budget`, at little extra time.

    `budget` is bytes, text with a unit ("8GiB"), or a share of the plain step's peak ("60%"): the measured one where the
    profile has it, else the predicted one. `allow="cheap"` redoes no matrix product, convolution or attention.

    Raises BudgetError for a budget that cannot be read; Infeasible, with the smallest peak, where no plan fits.
    """
    simulator = Simulator(profile)
    plain = simulator.predict(Decisions())
    measured = profile.measured_plain_peak_bytes
    budget_bytes = parse_budget(budget, of=plain.peak_bytes if measured is None else measured)
    problem = Simulator(only_cheap(profile)) if allow == "cheap" else simulator
    decisions = Decisions()
    if plain.peak_bytes > budget_bytes:
        decisions = solver(problem, budget_bytes)
    predicted = simulator.predict(decisions)
    assert predicted.peak_bytes <= budget_bytes, "a solver's decisions are over the budget"
    node = {slot.address: profile.values[slot.value].node for slot in reversed(profile.slots)}
    return Plan(
        fingerprint=profile.fingerprint,
        budget_bytes=budget_bytes,
        remake={address: node[address] for address in sorted(decisions.remake)},
        replay=tuple(call for call in dict.fromkeys(call.id for call in profile.calls) if call in decisions.replay),
        predicted=predicted,
        plain=plain,
        step_ms=profile.step_ms,
    )
