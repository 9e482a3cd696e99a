"""Rules for gradients that stay in memory longer than needed."""

from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT017",
    name="zero_grad between forward and backward",
    what="`zero_grad()` is called after the forward and before backward.",
    why="The previous step's gradients, as large as the parameters, stay in memory until the end of forward, where "
    "memory peaks.",
    bad="loss = criterion(model(x), y)\noptimizer.zero_grad()\nloss.backward()",
    good="optimizer.zero_grad()\nloss = criterion(model(x), y)\nloss.backward()",
    fix="call `zero_grad()` before the forward, or right after `optimizer.step()`",
)
class ZeroGradLate(Rule):
    """Rule for `zero_grad` calls between a forward and its backward, recorded once that backward pass has ended."""


@rule(
    "LT024",
    name="gradients that no optimizer uses",
    what="Backward computes gradients for parameters that are in no optimizer, and nothing resets them: a reference "
    "model, a teacher, or a part of the model that is not trained.",
    why="These gradients stay in memory and accumulate each step, forward saves a graph for them, and backward spends "
    "time on them, all for parameters that no optimizer updates.",
    bad="loss = distance(model(x), reference(x))\nloss.backward()",
    good="with torch.no_grad():\n    target = reference(x)\nloss = distance(model(x), target)\nloss.backward()",
    fix="{remedy}, and call `{name}.zero_grad()` once to free the gradients",
)
class UnreadGradients(Rule):
    """Rule for gradients that no optimizer reads, recorded when they are still there after several updates."""


@rule(
    "LT031",
    name="gradients discarded before any update",
    what="A backward pass computes gradients of a second model, and `zero_grad` discards them before that model's "
    "optimizer has read them: the discriminator of a GAN is trained on images that still have the generator's graph.",
    why="The backward pass through the second model is wasted time and memory, and `retain_graph=True` often keeps its "
    "graph for the loss that does need it.",
    bad="fake = generator(noise)\nloss(discriminator(fake)).backward()",
    good="fake = generator(noise)\nloss(discriminator(fake.detach())).backward()",
    fix="`.detach()` the output of `{name}` ({made}) in the loss that runs backward at {backward}{remedy}; if no other "
    "loss uses that output, make it under `torch.no_grad()`",
)
class DiscardedGradients(Rule):
    """Rule for gradients that are reset before their optimizer has read them, recorded when `zero_grad` is called."""


@rule(
    "LT018",
    name="zero_grad(set_to_none=False)",
    what="`zero_grad` fills gradients with zeros instead of setting them to None.",
    why="Gradients, as large as the parameters, then stay in memory during forward as well.",
    bad="optimizer.zero_grad(set_to_none=False)",
    good="optimizer.zero_grad()",
    fix="remove `set_to_none=False`; the default is True",
)
class SetToZero(Rule):
    """Rule for gradients that `zero_grad(set_to_none=False)` sets to zero instead of freeing, recorded at the call."""
