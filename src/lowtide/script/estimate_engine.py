"""The engine of a script's estimated steps: plain, with recomputes, or under a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lowtide.estimator.fake_step import planned
from lowtide.estimator.unrehearsed_plans import How, build_engine
from lowtide.levers import enable_plan_levers
from lowtide.runtime.fingerprint import describe_differences, fingerprint
from lowtide.script.apply_plan import build_stale_plan

if TYPE_CHECKING:
    from torch import nn

    from lowtide.levers import LeverStack
    from lowtide.planner.records import Plan
    from lowtide.runtime.engine import Engine


class EstimateEngine:
    """Factory of the engine that runs a script's estimated steps; compares the model and batch with the plan, if one is
    given.
    """

    def __init__(self, how: How, plan: Plan | None, *, on_any_device: bool) -> None:
        """Make engines of the kind `how`, or engines for `plan`, which may be for another device if `on_any_device`."""
        self._how: How = how
        self._plan, self._on_any_device = plan, on_any_device
        self._differences: tuple[str, ...] = ()
        """Differences between the plan's model and batch and those of the last step."""
        self._levers: LeverStack | None = None

    def make(self, model: nn.Module, batch: Any) -> Engine | None:
        """Return the engine that runs steps of `model`; None if a plan was given for another model or batch."""
        if self._plan is None:
            return build_engine(self._how, model)
        self._compare(self._plan, model, batch)
        if self._differences:
            return None
        self.remove_levers()  # levers of a model that the script no longer trains
        self._levers = enable_plan_levers(self._plan, model, ())
        return planned(model, self._plan)

    def check_batch(self, model: nn.Module, batch: Any) -> None:
        """Compare the batch of a later step with the plan's batch, and record differences for `check_model`."""
        if self._plan is not None and not self._differences:
            self._compare(self._plan, model, batch)

    def check_model(self, model: nn.Module) -> None:
        """Raise StalePlan if the plan was made for another model than `model`, or for another batch than the last
        step's.
        """
        if self._differences:
            raise build_stale_plan(model, self._differences)

    def remove_levers(self) -> None:
        """Remove the plan's levers from the model."""
        if self._levers is not None:
            self._levers.remove()

    def _compare(self, plan: Plan, model: nn.Module, batch: Any) -> None:
        made_for, current = plan.fingerprint, fingerprint(model, batch)
        if self._on_any_device:
            current = replace(current, device=made_for.device)
        self._differences = describe_differences(made_for, current)
