"""Private names of torch: limits to what inductor fuses into one kernel.

A fused kernel runs where the last of its parts would, so what they read, and what waits for their results, is in memory
until then. In backward, inductor fuses kernels that read the same value, such as the rotary embeddings that several
layers recompute, even across the layers between them. A plan's peak then exceeds its forecast, which assumes that each
kernel runs where the joint graph has it. Read in torch 2.13 (`torch/_inductor/choices.py`, `scheduler.py`).
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from typing import Any, Final

from torch import fx

MARK: Final = "lowtide_fuses_nearby_only"
"""Key in the metadata of a graph whose kernels are fused only with those next to them. The entry is True if that holds
for a kernel and its reader as well.
"""


def fuse_nearby_only(graph: fx.GraphModule, *, is_mixed: bool) -> None:
    """Let inductor fuse only kernels of `graph` that no matrix product or other extern kernel separates, on a CPU and
    after `respect_marks`. A kernel is fused with its only reader wherever that is; in a graph with 16-bit values
    (`is_mixed`) with any reader, since in the fused kernel it reads the value before it is rounded to 16 bits.
    """
    graph.meta[MARK] = not is_mixed


def respect_marks() -> Callable[[], None]:
    """Respect the marks of `fuse_nearby_only` in inductor until the returned function is called."""
    from torch._inductor.choices import InductorChoices

    owner: Any = InductorChoices
    horizontal, vertical = owner.can_fuse_horizontal, owner.can_fuse_vertical
    separators = weakref.WeakKeyDictionary[Any, list[int]]()

    def is_far(scheduler: Any, first: Any, second: Any) -> bool:
        if scheduler not in separators:
            separators[scheduler] = sorted(node.min_order for node in scheduler.nodes if _is_separator(node))
        orders = separators[scheduler]
        begin, end = sorted(((first.min_order, first.max_order), (second.min_order, second.max_order)))
        return bisect.bisect(orders, begin[1]) < bisect.bisect(orders, end[0])

    def can_fuse_horizontal(scheduler: Any, first: Any, second: Any, score: int) -> bool:
        may = horizontal(scheduler, first, second, score)
        return bool(may and not (_mark(first) is not None and is_far(scheduler, first, second)))

    def can_fuse_vertical(scheduler: Any, first: Any, second: Any, score: int) -> bool:
        may = vertical(scheduler, first, second, score)
        return bool(may and not (_mark(first) and is_far(scheduler, first, second) and _is_written(first, second)))

    owner.can_fuse_horizontal, owner.can_fuse_vertical = map(staticmethod, (can_fuse_horizontal, can_fuse_vertical))

    def undo() -> None:
        owner.can_fuse_horizontal, owner.can_fuse_vertical = map(staticmethod, (horizontal, vertical))

    return undo


def _mark(node: Any) -> bool | None:
    """Return the mark of the graph that is scheduled; None without one, and on a GPU."""
    from torch._inductor.virtualized import V

    graph: Any = V.graph.module
    return graph.meta.get(MARK) if node.get_device().type == "cpu" else None


def _is_separator(node: Any) -> bool:
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    return isinstance(node, ExternKernelSchedulerNode) or bool(node.is_template())


def _is_written(first: Any, second: Any) -> bool:
    """Return True if results of `first` that `second` reads are in memory even if both are fused."""
    inside = {node.get_name() for kernel in (first, second) for node in kernel.get_nodes()}
    read = second.read_writes.buffer_names()
    users = [
        {user.get_name() for user in result.users if not user.is_weak}
        for result in first.get_outputs()
        if result.get_name() in read
    ]
    return all(names - inside for names in users)
