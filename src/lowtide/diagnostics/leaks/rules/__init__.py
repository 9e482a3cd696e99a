"""The rules of `watch`, one file per group. Importing this package registers all of them."""

from lowtide.diagnostics.leaks.rules import (
    carried_state,
    checkpoint_mistakes,
    duplicate_inputs,
    growing_containers,
    interpreter,
    long_lived_outputs,
    retained_graphs,
    small_views,
    stale_gradients,
    stored_tensors,
    unreached_graphs,
    weight_graphs,
)
from lowtide.diagnostics.leaks.rules.rule_registry import RULES as RULES
from lowtide.diagnostics.leaks.rules.rule_registry import Rule as Rule

__all__ = [
    "RULES",
    "Rule",
    "carried_state",
    "checkpoint_mistakes",
    "duplicate_inputs",
    "growing_containers",
    "interpreter",
    "long_lived_outputs",
    "retained_graphs",
    "small_views",
    "stale_gradients",
    "stored_tensors",
    "unreached_graphs",
    "weight_graphs",
]
