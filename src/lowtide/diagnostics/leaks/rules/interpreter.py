"""Objects that Python itself remembers: exceptions with their frames, and results of notebook cells."""

from lowtide.diagnostics.leaks.holder_history import History
from lowtide.diagnostics.leaks.inspection import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT015",
    priority=10,
    name="exception that holds a forward's frames",
    what="An exception is being handled, or kept, and the frames in its traceback hold tensors of the failed forward.",
    why="A retry inside `except` runs while the failed forward is still in memory: after an out-of-memory error it "
    "runs out again. Outside `except` nothing is held.",
    bad="except RuntimeError:\n    loss = forward(smaller)",
    good="except RuntimeError:\n    failed = True\nif failed:\n    loss = forward(smaller)",
    fix="leave the `except` block before trying again, and do not keep the exception",
)
class KeptException(Rule):
    """Rule for tensors that an exception holds."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_held_as("exception")


@rule(
    "LT016",
    priority=20,
    name="notebook history",
    what="A cell or line ended in a tensor, and the interpreter remembers it as `_`, `Out[n]` and so on.",
    why=(
        "The tensor stays with its graph until three more results have been shown (`_`, `__`, `___`), or forever "
        "(`Out`)."
    ),
    bad="model(x)",
    good="output = model(x)",
    fix="end the cell with `;` or an assignment, and clear the history with `%reset -f out`",
)
class NotebookHistory(Rule):
    """Rule for tensors that the history of a notebook or prompt holds."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_held_as("notebook")
