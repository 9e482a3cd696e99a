"""Rules for objects that Python itself keeps: exceptions with their frames, and results of notebook cells."""

from lowtide.diagnostics.leaks.holder_history import History, grows
from lowtide.diagnostics.leaks.retained_object import RetainedObject
from lowtide.diagnostics.leaks.rules.rule_registry import Rule, rule


@rule(
    "LT015",
    priority=10,
    name="exception that holds a forward's frames",
    what="An exception is still being handled, or stored, and the frames of its traceback hold tensors of the failed "
    "forward.",
    why="A retry inside `except` runs while the failed forward is still in memory, so after an out-of-memory error it "
    "runs out of memory again. After the `except` block, Python frees those frames.",
    bad="except RuntimeError:\n    loss = forward(smaller)",
    good="except RuntimeError:\n    failed = True\nif failed:\n    loss = forward(smaller)",
    fix="retry after the `except` block, not inside it, and do not keep the exception",
)
class KeptException(Rule):
    """Rule for tensors that an exception holds."""

    fix_of_prompt = (
        "free it where the prompt or notebook keeps the last exception: `del sys.last_value, sys.last_traceback` (and "
        "`sys.last_exc`)"
    )

    def choose_fix(self, item: RetainedObject, history: History) -> str:
        """Return the advice for `item`. It differs if a prompt or notebook keeps the exception."""
        is_last = item.holder is not None and item.holder.name in ("last_value", "last_exc", "last_traceback")
        return self.fix_of_prompt if is_last else super().choose_fix(item, history)

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_held_as("exception")


@rule(
    "LT032",
    priority=15,
    name="reference cycle with the garbage collector off",
    what="`gc.disable()` was called, and each step leaves objects that refer to each other and hold its tensors.",
    why="Without the garbage collector nothing frees such objects: each step's tensors stay in memory.",
    bad="gc.disable()\n...\nresult.trainer, trainer.result = trainer, result",
    good="gc.disable()\n...\nresult.trainer, trainer.result = weakref.proxy(trainer), result",
    fix="break the cycle at `{name}` (a weak reference, or None after the step), or call `gc.collect()` now and then",
)
class CycleWithoutCollector(Rule):
    """Rule for a reference cycle that holds more tensors at each inspection, with the garbage collector off."""

    gathers = True

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_held_as("cycle") and grows(history.held_bytes)


@rule(
    "LT016",
    priority=20,
    name="tensor kept by notebook history",
    what="The last expression of a cell or line was a tensor, and the interpreter keeps it as `_` or `Out[n]`.",
    why=(
        "The tensor and its graph stay in memory until three more results have been displayed (`_`, `__`, `___`), or "
        "until the kernel restarts (`Out`)."
    ),
    bad="model(x)",
    good="output = model(x)",
    fix="end the cell with `;` or an assignment, and clear the history with `%reset -f out`",
)
class NotebookHistory(Rule):
    """Rule for tensors that the history of a notebook or prompt holds."""

    def matches(self, item: RetainedObject, history: History) -> bool:
        return item.is_held_as("notebook")
