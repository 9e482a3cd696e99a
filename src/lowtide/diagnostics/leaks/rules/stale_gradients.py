"""Gradients that stay in memory longer than needed."""

from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT017",
    name="zero_grad between forward and backward",
    what="`zero_grad()` is called after the forward and before backward.",
    why="The last step's gradients live through the whole forward, to its end, where memory use peaks: as much as "
    "the parameters.",
    bad="loss = criterion(model(x), y)\noptimizer.zero_grad()\nloss.backward()",
    good="optimizer.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()",
    fix="call `zero_grad()` before the forward, or right after `optimizer.step()`",
)
class ZeroGradLate(Rule):
    """Rule for late `zero_grad` calls, recorded by `zero_grad`."""


@rule(
    "LT024",
    name="gradients that no optimizer has",
    what="Backward reaches a model whose parameters are in no optimizer, and whose gradients are never reset: a "
    "reference model, a teacher, or a part of the model that is not trained.",
    why="Its gradients stay in memory and grow by addition each step, its forward saves a graph, and backward computes "
    "through it: all for parameters that nothing updates.",
    bad="loss = distance(model(x), reference(x))\nloss.backward()",
    good="with torch.no_grad():\n    target = reference(x)\nloss = distance(model(x), target)\nloss.backward()",
    fix="{remedy}, and `{name}.zero_grad()` once to free the gradients",
)
class UnreadGradients(Rule):
    """Rule for gradients that no optimizer reads, recorded when they are still there after several updates."""


@rule(
    "LT031",
    name="gradients discarded before any update",
    what="A backward pass computes gradients of a second model, and `zero_grad` discards them before that model's "
    "optimizer has read them: the discriminator of a GAN is trained on images that still have the generator's graph.",
    why="Backward goes through the whole second model for nothing: its time, its gradients, and its graph, which "
    "`retain_graph=True` then often keeps for the loss that does need it.",
    bad="fake = generator(noise)\nloss(discriminator(fake)).backward()",
    good="fake = generator(noise)\nloss(discriminator(fake.detach())).backward()",
    fix="`.detach()` the output of `{name}` ({made}) in the loss whose backward is at {backward}{remedy}",
)
class DiscardedGradients(Rule):
    """Rule for gradients that are reset before their optimizer has read them, recorded by `zero_grad`."""


@rule(
    "LT018",
    name="zero_grad(set_to_none=False)",
    what="Gradients are set to zero instead of None.",
    why="Gradients then take memory all the time, as much as the parameters.",
    bad="optimizer.zero_grad(set_to_none=False)",
    good="optimizer.zero_grad()",
    fix="leave `set_to_none` at its default, True",
)
class SetToZero(Rule):
    """Rule for gradients set to zero, recorded by `zero_grad`."""
