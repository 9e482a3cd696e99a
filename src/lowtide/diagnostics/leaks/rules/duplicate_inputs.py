"""A batch that is in memory twice."""

from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT019",
    name="batch kept twice",
    what="A variable still holds a second tensor with the same values and shape as the model's input, on the same "
    "device: the batch before it was cast or copied.",
    why="The original batch is no longer needed, but stays in memory for the whole step.",
    bad="images = batch.float()\nmodel(images)",
    good="batch = batch.float()\nmodel(batch)",
    fix="assign the copy to the same variable, or `del {name}`",
)
class BatchTwice(Rule):
    """Rule for a second copy of the batch, recorded when the model is called."""
