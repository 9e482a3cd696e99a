"""What Python itself remembers: exceptions with their frames, and the results of notebook cells."""

from lowtide.diagnostics.leaks.finding import Past, Rule
from lowtide.diagnostics.leaks.inspection import Survivor


def _is_exception(survivor: Survivor, past: Past) -> bool:
    return survivor.is_by_exception


def _is_notebook(survivor: Survivor, past: Past) -> bool:
    return survivor.holder is not None and survivor.holder.kind == "notebook"


EXCEPTION = Rule(
    code="LT015",
    name="exception that holds a forward's frames",
    what="An exception is being handled, or kept, and the frames in its traceback hold tensors of the failed forward.",
    why="A retry inside `except` runs while the failed forward is still in memory: after an out-of-memory error it "
    "runs out again. Outside of `except` nothing is held.",
    bad="except RuntimeError:\n    loss = forward(smaller)",
    good="except RuntimeError:\n    failed = True\nif failed:\n    loss = forward(smaller)",
    fix="leave the `except` block before trying again, and do not keep the exception",
    matches=_is_exception,
)

NOTEBOOK = Rule(
    code="LT016",
    name="notebook history",
    what="A cell or line ended in a tensor, and the interpreter remembers it as `_`, `Out[n]` and so on.",
    why="The tensor stays with its graph until three more results came (`_`, `__`, `___`), or for ever (`Out`).",
    bad="model(x)",
    good="output = model(x)",
    fix="end the cell with `;` or an assignment, and clear the history with `%reset -f out`",
    matches=_is_notebook,
)
