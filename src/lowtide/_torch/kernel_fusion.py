"""Private names of torch: limits to what inductor fuses into one kernel.

A fused kernel runs where the last of its parts would, so their inputs, and values that wait for their results, are in
memory until then. In backward, inductor fuses kernels that read the same value, such as the rotary embeddings that
several layers recompute, even across the layers between them. A plan's peak then exceeds its forecast, which assumes
that each kernel runs where the joint graph has it. Read in torch 2.13 (`torch/_inductor/choices.py`, `scheduler.py`).
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from typing import Any, Final

from torch import fx

from lowtide._torch.plain_kernels import RECOMPUTED

MARK: Final = "lowtide_fuses_nearby_only"
"""Key in the metadata of a graph whose kernels are fused only with neighbouring kernels."""


def fuse_nearby_only(graph: fx.GraphModule) -> None:
    """Mark `graph` so that inductor fuses no kernels across a matrix product or another extern kernel between them.

    A kernel and the only reader of its result are still fused. The mark takes effect on a CPU, after `respect_marks`.
    """
    graph.meta[MARK] = True


def respect_marks() -> Callable[[], None]:
    """Make inductor respect the marks of `fuse_nearby_only`, and keep kernels that recompute values apart from others.

    The returned function undoes this.
    """
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

    def may_fuse(scheduler: Any, first: Any, second: Any, *, only_nearby: bool) -> bool:
        kinds = {_is_recomputed(first), _is_recomputed(second)}
        if len(kinds) == 2:
            return False
        return not (only_nearby and (kinds == {True} or _is_marked(first)) and is_far(scheduler, first, second))

    def can_fuse_horizontal(scheduler: Any, first: Any, second: Any, score: int) -> bool:
        may = horizontal(scheduler, first, second, score)
        return bool(may and may_fuse(scheduler, first, second, only_nearby=True))

    def can_fuse_vertical(scheduler: Any, first: Any, second: Any, score: int) -> bool:
        may = vertical(scheduler, first, second, score)
        only_nearby = _is_marked(first) and _is_written(first, second)
        return bool(may and may_fuse(scheduler, first, second, only_nearby=only_nearby))

    owner.can_fuse_horizontal, owner.can_fuse_vertical = map(staticmethod, (can_fuse_horizontal, can_fuse_vertical))

    def undo() -> None:
        owner.can_fuse_horizontal, owner.can_fuse_vertical = map(staticmethod, (horizontal, vertical))

    return undo


def _is_marked(node: Any) -> bool:
    """Return True if `node`, a kernel that inductor schedules on a CPU, belongs to a graph marked by
    `fuse_nearby_only`.
    """
    from torch._inductor.virtualized import V

    graph: Any = V.graph.module
    return MARK in graph.meta and node.get_device().type == "cpu"


def _is_recomputed(node: Any) -> bool:
    """Return True if `node`, one or several kernels to be fused, recomputes an input of torch's own backward graph
    (`plain_kernels.py`).
    """
    return any(
        RECOMPUTED in origin.meta
        for kernel in node.get_nodes()
        if kernel.node is not None
        for origin in kernel.node.get_origins()
    )


def _is_separator(node: Any) -> bool:
    from torch._inductor.scheduler import ExternKernelSchedulerNode

    return isinstance(node, ExternKernelSchedulerNode) or bool(node.is_template())


def _is_written(first: Any, second: Any) -> bool:
    """Return True if a kernel fused from `first` and `second` must still write the results of `first` to memory.

    It must if each result that `second` reads has other readers, too.
    """
    inside = {node.get_name() for kernel in (first, second) for node in kernel.get_nodes()}
    read = second.read_writes.buffer_names()
    users = [
        {user.get_name() for user in result.users if not user.is_weak}
        for result in first.get_outputs()
        if result.get_name() in read
    ]
    return all(names - inside for names in users)
