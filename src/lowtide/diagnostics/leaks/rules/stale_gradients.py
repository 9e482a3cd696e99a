"""Gradients that stay in memory longer than needed."""

from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT017",
    name="zero_grad between forward and backward",
    what="`zero_grad()` is called after the forward and before backward.",
    why="The last step's gradients live through the whole forward, to its end where memory is fullest: as much as "
    "the parameters.",
    bad="loss = criterion(model(x), y)\noptimizer.zero_grad()\nloss.backward()",
    good="optimizer.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()",
    fix="call `zero_grad()` before the forward, or right after `optimizer.step()`",
)
class ZeroGradLate(Rule):
    """Recorded by `zero_grad`."""


@rule(
    "LT018",
    name="zero_grad(set_to_none=False)",
    what="Gradients are set to zero instead of None.",
    why="Their memory is never given back: as much as the parameters, all the time.",
    bad="optimizer.zero_grad(set_to_none=False)",
    good="optimizer.zero_grad()",
    fix="leave `set_to_none` at its default, True",
)
class SetToZero(Rule):
    """Recorded by `zero_grad`."""
