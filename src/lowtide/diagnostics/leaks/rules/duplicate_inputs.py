"""A batch that is in memory twice."""

from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT019",
    name="batch kept twice",
    what="The model's input has the same values as another tensor of the same shape on the same device that a "
    "variable still holds: the batch before its cast or copy.",
    why="The first copy is no longer needed, and lives through the whole step.",
    bad="images = batch.float()\nmodel(images)",
    good="batch = batch.float()\nmodel(batch)",
    fix="give the copy the same name, or `del {name}`",
)
class BatchTwice(Rule):
    """Rule for a second copy of the batch, recorded when the model is called."""
