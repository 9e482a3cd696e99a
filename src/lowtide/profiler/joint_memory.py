"""Computation of the bytes in memory at each call of a compiled graph, from its joint graph.

A value takes memory where inductor has to write it: results of extern kernels and reductions, arguments of extern
kernels, and outputs; with 16-bit values also values that many calls read, such as gradients of a residual stream. All
other values exist within fused kernels only. The order is that of the joint graph, except for fused arithmetic, which
is lowered right before the extern kernel or reduction that needs it; recomputed values come right before the first call
that needs them. On a CPU, kernels that no extern kernel separates have their inputs in memory together with all their
outputs; each output may overwrite an input of its size that nothing reads later. Not modelled are inductor's own
reordering, and a GPU's kernels with several outputs. Scratch memory of extern kernels is measured
(`compiled_profile.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import accumulate, pairwise
from typing import Final, cast

from lowtide._torch.inductor import PRODUCTS
from lowtide._torch.joint_graph import JointGraph
from lowtide.memory.events import Allocate, Event, Free, Mark
from lowtide.runtime.joint_slots import SMALL, Recomputed

NONE: Final[Mapping[int, int]] = {}
PRODUCT: Final = "matrix product"
"""Label of the marks at matrix products; their data are what `watched_products` notes."""
MOST_READS: Final = 4
"""Largest number of values that reused fused arithmetic reads before inductor writes its result."""
MOST_READS_IN_ALL: Final = {"cpu": 12, "gpu": 8}
"""Largest number of values that any fused arithmetic reads."""
HEAVY: Final = frozenset({"aten.exp", "aten.log", "aten.log10", "aten.log1p", "aten.log2", "aten.sigmoid", "aten.tanh"})
"""Functions that inductor does not compute twice on a CPU."""


@dataclass(frozen=True, slots=True)
class GraphHalf:
    """Memory of the forward or backward half of a joint graph. Positions are the half's calls, and one for its end."""

    order: tuple[int, ...]
    """Value computed at each position but the last."""
    levels: tuple[int, ...]
    """Bytes at each position, relative to the beginning of the half."""
    allocated_at: dict[int, int]
    """Position that allocates each value that takes memory."""
    first: dict[int, int]
    """First position that reads each value."""
    last: dict[int, int]
    """Last position that reads each value."""
    demanded: dict[int, int]
    """Position from which each value is in memory if it is recomputed: the beginning of the fused arithmetic that reads
    the value first, because inductor lowers that arithmetic later than the calls that compute the value.
    """


def compute_forward_half(
    joint: JointGraph, recomputed: Recomputed, scratch: Mapping[int, int] = NONE, kept_apart: Collection[int] = ()
) -> GraphHalf:
    """Compute the memory of the forward half of a joint graph, which saves the values that `recomputed` names.

    Args:
        joint: The graph.
        recomputed: Values that are saved, and values that are recomputed in backward.
        scratch: Scratch memory of extern kernels, by node.
        kept_apart: Values that inductor writes to memory wherever they are computed (`JointSlots.kept_apart`).
    """
    nodes = joint.nodes
    outputs = [*joint.forward_outputs, *(i for i in recomputed.given if nodes[i].kind != "input")]
    return _half(joint, upstream(joint, outputs), (), outputs, scratch, kept_apart)


def compute_backward_half(
    joint: JointGraph, recomputed: Recomputed, scratch: Mapping[int, int] = NONE, kept_apart: Collection[int] = ()
) -> GraphHalf:
    """Compute the memory of the backward half of a joint graph, which frees each saved value after its last read.

    The arguments are those of `compute_forward_half`.
    """
    nodes = joint.nodes
    given = {nodes[i].root for i in recomputed.given} | {i for i, node in enumerate(nodes) if node.is_tangent}
    given = {root for root in given if nodes[root].kind != "input" or nodes[root].is_tangent}
    return _half(
        joint, _list_backward_order(joint, recomputed.again), given, joint.backward_outputs, scratch, kept_apart
    )


def read_scratch_bytes(
    joint: JointGraph, torchs_own: Recomputed, recorded: tuple[Sequence[Event], Sequence[Event]]
) -> dict[int, int]:
    """Return, by node, the bytes of scratch memory of extern kernels on 16-bit values, which sum in 32 bits.

    Matrix products are found by the bytes of their operands, because inductor reorders them; other kernels are found by
    their order. A kernel is left out unless it has one recorded allocation for each node.

    Args:
        joint: The graph.
        torchs_own: Torch's own partition, under which the step was recorded.
        recorded: Events of forward and backward, with marks at matrix products.
    """
    outputs = [*joint.forward_outputs, *torchs_own.given]
    orders = upstream(joint, outputs), _list_backward_order(joint, torchs_own.again)
    scratch = dict[int, int]()
    for order, events in zip(orders, recorded, strict=True):
        of_kernel: dict[_Kernel, list[int]] = {}
        for value in _order_as_lowered(joint, order, ()):
            if joint.nodes[value].kind == "extern" and joint.nodes[value].is_half:
                of_kernel.setdefault(_kernel(joint, value), []).append(value)
        sizes = _list_scratch_sizes(events)
        for kernel, values in of_kernel.items():
            if len(values) == len(sizes.get(kernel, ())):
                scratch |= dict(zip(values, sizes[kernel], strict=True))
    return scratch


_Kernel = str | tuple[int, ...]
"""Name of an operator; for matrix products the bytes of both operands."""


def _kernel(joint: JointGraph, value: int) -> _Kernel:
    node = joint.nodes[value]
    operator = joint.nodes[node.args[0]].target if node.target == "getitem" else node.target
    if operator.removeprefix("aten.") in PRODUCTS:
        return tuple(joint.nodes[arg].bytes for arg in node.args[-2:])
    return operator


def _list_scratch_sizes(events: Sequence[Event]) -> dict[_Kernel, list[int]]:
    """Return the bytes of blocks that are freed right after their allocation, by kernel: one number for each matrix
    product, and one for each block of other kernels.
    """
    sizes: dict[_Kernel, list[int]] = {}
    product: tuple[int, ...] = ()
    """Operands of the product that runs, if any."""
    for event, following in pairwise(events):
        if type(event) is Mark and event.label == PRODUCT:
            product = cast("tuple[int, ...]", event.data)
            if product:
                sizes.setdefault(product, []).append(0)
        elif type(event) is Allocate and type(following) is Free and event.block == following.block:
            if product:
                sizes[product][-1] = max(sizes[product][-1], event.bytes)
            else:
                sizes.setdefault(event.op.replace("::", ".").replace("mkldnn_", ""), []).append(event.bytes)
    return sizes


def unmodelled(joint: JointGraph, half: GraphHalf, events: Sequence[Event]) -> dict[int, int]:
    """Return the recorded bytes that no written value accounts for.

    They are given by value, as the bytes in memory when each value of the half is computed; the bytes at the half's end
    are under -1.

    Such bytes belong to copies of arguments, and to values that inductor writes because many calls read them.
    Allocations are matched with written values in order: a match has equal size, and both are freed within the half, or
    both after it.
    """
    end, nodes = len(half.order), joint.nodes
    freed = {event.block: at for at, event in enumerate(events) if isinstance(event, Free)}
    allocations = {at: event for at, event in enumerate(events) if isinstance(event, Allocate)}
    small = max((event.bytes for event in allocations.values()), default=0) // SMALL
    allocations = {at: event for at, event in allocations.items() if event.bytes > small}
    in_order = sorted(half.allocated_at, key=half.allocated_at.__getitem__)
    allocated = [value for value in in_order if nodes[value].bytes > small]
    matched = SequenceMatcher(
        None,
        [(event.bytes, event.block in freed) for event in allocations.values()],
        [(nodes[value].bytes, half.last.get(value, 0) < end) for value in allocated],
        autojunk=False,
    ).get_matching_blocks()
    position = {first + k: half.allocated_at[allocated[value + k]] for first, value, n in matched for k in range(n)}
    reached = [0] * len(events)
    """Position that the half has reached at each event."""
    for number, at in enumerate(allocations):
        reached[at] = position.get(number, 0)
    reached = list(accumulate(reached, max))
    more_bytes = [0] * (end + 1)
    for number, (at, event) in enumerate(allocations.items()):
        if number not in position:
            last = reached[freed[event.block]] if event.block in freed else end
            first = min(reached[at] + 1, last)  # scratch memory of one call, or a value that comes after it
            for index in range(first, last + 1):
                more_bytes[index] += event.bytes
    return dict(zip((*half.order, -1), more_bytes, strict=True))


def upstream(joint: JointGraph, ends: Iterable[int]) -> list[int]:
    """Return the values `ends` and all values from which they are computed, in order."""
    reached, pending = set[int](), list(ends)
    while pending:
        node = pending.pop()
        if node not in reached and joint.nodes[node].kind != "input":
            reached.add(node)
            pending += joint.nodes[node].args
    return sorted(reached)


def _list_backward_order(joint: JointGraph, again: Collection[int]) -> list[int]:
    nodes, order, done = joint.nodes, list[int](), set[int]()
    for at, node in enumerate(nodes):
        if not node.is_backward:
            continue
        needed, pending = list[int](), list(node.args)
        while pending:
            arg = pending.pop()
            if arg in again and arg not in done:
                done.add(arg)
                needed.append(arg)
                pending += nodes[arg].args
        order += [*sorted(needed), at]
    return order


def _find_fused_reads(joint: JointGraph, value: int, inside: Collection[int], is_written: Collection[int]) -> set[int]:
    """Return the values in memory that the fused kernel of `value` reads, except parameters; empty for an extern
    kernel.

    `inside` has the values that this half of the graph computes, `is_written` those that it writes to memory.
    """
    nodes, fused, pending, reads = joint.nodes, {value}, [value], set[int]()
    while pending and nodes[value].kind != "extern":
        for arg in nodes[pending.pop()].args:
            root = nodes[arg].root
            is_fused = arg in inside and arg not in is_written and nodes[arg].kind in ("pointwise", "view")
            if is_fused and arg not in fused:
                fused.add(arg)
                pending.append(arg)
            if root in is_written or root not in inside:
                reads.add(root)
    return {root for root in reads if nodes[root].kind != "input" or nodes[root].is_given}


def written(joint: JointGraph, order: Sequence[int], outputs: Collection[int]) -> set[int]:
    """Return the values of `order` that inductor writes to memory."""
    nodes, inside, outputs = joint.nodes, set(order), set(outputs)
    into = _find_fused_products(joint, inside, outputs)
    sums = set(into.values())
    values = set[int]()
    for at in order:
        if nodes[at].kind == "view" or at in into:
            continue
        if nodes[at].kind != "pointwise" or at in sums:
            values.add(at)
            continue
        reached, pending = {at}, [at]
        while pending:
            value = pending.pop()
            users = [user for user in nodes[value].users if user in inside and user not in reached]
            if value in outputs or any(nodes[user].kind == "extern" or user in sums for user in users):
                values.add(at)
                break
            views = [user for user in users if nodes[user].kind == "view"]
            reached.update(views)
            pending += views
    return values


def _find_reused(joint: JointGraph, order: Sequence[int], is_written: Collection[int], *, is_twice: bool) -> set[int]:
    """Return the values of `order`, beyond `is_written`, that inductor writes because several kernels read them (torch
    2.13, `should_realize_on_reuse` in `torch/_inductor/ir.py`).

    With `is_twice`, backward has one copy of each recomputed value for gradients, and one for other recomputed values
    (`plain_kernels.py`).
    """
    nodes, inside = joint.nodes, set(order)
    reads: dict[int, frozenset[int]] = {}
    """Values in memory that fused arithmetic reads, by its result."""
    most_reads = MOST_READS_IN_ALL["cpu" if joint.is_on_cpu else "gpu"]
    is_heavy, candidates = set[int](), set[int]()
    for value in order:
        node, fused = nodes[value], [arg for arg in nodes[value].args if arg in reads]
        if node.kind not in ("pointwise", "view") or value in is_written:
            continue
        read = frozenset(nodes[arg].root for arg in node.args if arg not in reads)
        read = read.union(*(reads[arg] for arg in fused))
        if joint.is_on_cpu and (node.target in HEAVY or not is_heavy.isdisjoint(fused)):
            is_heavy.add(value)
        n_users = sum(user in inside for user in node.users)
        is_reused = n_users > 1 and (value in is_heavy or len(read) > MOST_READS)
        if node.kind == "pointwise" and (is_reused or len(read) > most_reads):
            candidates.add(value)
        else:
            reads[value] = read
    group, groups = 0, dict[int, int]()
    """Number of extern kernels before each value."""
    for value in order:
        groups[value] = group
        group += nodes[value].kind == "extern"
    readers: dict[int, set[tuple[bool, int]]] = {}
    """Groups of the kernels that read each value, and whether they read the copy for gradients."""
    written = set[int]()
    for value in reversed(order):
        users = [user for user in nodes[value].users if user in inside]
        inlined = [user for user in users if nodes[user].kind in ("pointwise", "view") and user not in is_written]
        inlined = [user for user in inlined if user not in written]
        own = {(is_twice and nodes[user].is_backward, groups[user]) for user in users if user not in inlined}
        readers[value] = own.union(*(readers[user] for user in inlined))
        n_kernels = Counter(copy for copy, _ in readers[value])
        if value in candidates and max(n_kernels.values(), default=0) > 1:
            written.add(value)
    return written


def _find_fused_products(joint: JointGraph, inside: Collection[int], outputs: Collection[int]) -> dict[int, int]:
    """Return the matrix products that inductor fuses into a following sum (`addmm`), each with its sum.

    Such a product and its sum are one call, at the place of the sum; the product's operands stay in memory until then.
    """
    nodes, sums = joint.nodes, dict[int, int]()
    for at in sorted(inside):
        if nodes[at].target != "aten.add":
            continue
        for arg in nodes[at].args:
            users = [user for user in nodes[arg].users if user in inside]
            is_whole = nodes[arg].target == "aten.mm" and nodes[arg].bytes == nodes[at].bytes
            if is_whole and arg in inside and arg not in outputs and users == [at]:
                sums[arg] = at
                break
    return sums


def _order_as_lowered(joint: JointGraph, order: Sequence[int], outputs: Collection[int]) -> list[int]:
    """Return `order` with fused arithmetic right before the first extern kernel or reduction that needs it.

    Inductor lowers fused arithmetic only when it is needed, so later calls may come before it. Outputs are lowered
    where they are: under autocast, a weight's gradient is converted right after its product.
    """
    nodes, inside = joint.nodes, set(order)
    place = {node: at for at, node in enumerate(order)}
    lowered: dict[int, None] = {}
    ends = {*outputs, *(node for node in order if nodes[node].kind in ("extern", "reduction"))}
    for at in [*(node for node in order if node in ends), *order]:
        needed, pending = set[int](), [at]
        while pending:
            node = pending.pop()
            if node in inside and node not in lowered and node not in needed:
                needed.add(node)
                pending += nodes[node].args
        lowered |= dict.fromkeys(sorted(needed, key=place.__getitem__))
    return list(lowered)


def _half(
    joint: JointGraph,
    order: Sequence[int],
    given: Collection[int],
    outputs: Collection[int],
    scratch: Mapping[int, int],
    kept_apart: Collection[int],
) -> GraphHalf:
    order = _order_as_lowered(joint, order, outputs)
    nodes, place = joint.nodes, {value: at for at, value in enumerate(order)}
    is_written = written(joint, order, [*outputs, *kept_apart])
    if any(node.is_half for node in nodes):  # in 32 bits, values that many calls read are inputs of matrix products
        is_written |= _find_reused(joint, order, is_written, is_twice=bool(kept_apart))
    begins, ends = _find_kernel_spans(joint, order, is_written)
    first, last = _find_read_spans(joint, order, is_written, begins, ends)
    _, latest = _find_read_spans(joint, order, is_written, {}, {})
    for value in outputs:
        last[nodes[value].root] = len(order)
    forward_outputs = {nodes[value].root for value in joint.forward_outputs}  # their memory is not backward's
    own = {*is_written, *(root for root in given if not nodes[root].is_tangent)} - forward_outputs
    for writer in [value for value in order if value in is_written and nodes[value].kind == "pointwise"]:
        reads = _find_fused_reads(joint, writer, place, is_written) & own
        for root in sorted(reads):  # the writer overwrites an input that nothing reads later
            is_free = latest.get(root) == place[writer] and last[root] < len(order)
            if is_free and nodes[root].bytes == nodes[writer].bytes:
                last[root], begins[writer] = place[writer] - 1, place[writer]
                own.discard(root)
                break
    changes = [0] * (len(order) + 2)
    for root in given:
        changes[min(last.get(root, -1), len(order)) + 1] -= nodes[root].bytes
    allocated_at = {value: begins.get(value, place[_find_allocating_node(joint, value, place)]) for value in is_written}
    for value, at in allocated_at.items():
        changes[at] += nodes[value].bytes
        end = last.get(value, ends.get(value, at))
        if end < len(order):
            changes[end + 1] -= nodes[value].bytes
    levels, level = list[int](), 0
    for value, change in zip((*order, -1), changes, strict=False):
        level += change
        levels.append(level + scratch.get(value, 0))
    begin, beginnings = 0, list[int]()
    for at, value in enumerate(order):
        beginnings.append(begin)
        if nodes[value].kind in ("extern", "reduction"):
            begin = at + 1
    return GraphHalf(
        tuple(order), tuple(levels), allocated_at, first, last, {value: beginnings[at] for value, at in first.items()}
    )


def _find_allocating_node(joint: JointGraph, value: int, inside: Collection[int]) -> int:
    """Return the node whose call allocates a written value. All results of an extern kernel, each selected by a
    `getitem` node, are allocated in its call.
    """
    nodes = joint.nodes
    source = nodes[value].args[0] if nodes[value].target == "getitem" else value
    return source if source in inside and nodes[source].kind == "extern" else value


def _find_read_spans(
    joint: JointGraph,
    order: Sequence[int],
    is_written: Collection[int],
    begins: Mapping[int, int],
    ends: Mapping[int, int],
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first and the last position at which each value is read, as two mappings.

    `begins` and `ends` are the results of `_find_kernel_spans`.
    """
    nodes, place = joint.nodes, {value: at for at, value in enumerate(order)}
    earliest: dict[int, int] = {}
    latest: dict[int, int] = {}
    for value in reversed(order):  # a fused value is computed at the positions of its readers
        users = [user for user in nodes[value].users if user in place]
        if nodes[value].kind == "view" and (value in is_written or not users):
            earliest[value] = latest[value] = -1
        elif value in is_written or not users:
            earliest[value], latest[value] = begins.get(value, place[value]), ends.get(value, place[value])
        else:
            earliest[value] = min(earliest[user] for user in users)
            latest[value] = max(latest[user] for user in users)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for value in order:
        if nodes[value].kind == "view":
            continue
        for arg in nodes[value].args:
            root = nodes[arg].root
            first[root] = min(first.get(root, len(order)), earliest[value])
            last[root] = max(last.get(root, -1), latest[value])
    return first, last


def _find_kernel_spans(
    joint: JointGraph, order: Sequence[int], is_written: Collection[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return, for values that one call of fused kernels writes together, the first and the last position of that call.

    On a CPU, inductor calls fused kernels that no extern kernel separates as one kernel (torch 2.13, `KernelGroup` in
    `torch/_inductor/codegen/cpp.py`). The inputs of such a call are in memory together with all its outputs.
    """
    nodes = joint.nodes
    begins, ends = dict[int, int](), dict[int, int]()
    if not joint.is_on_cpu:
        return begins, ends
    group: list[int] = []
    """Positions of the values that are written by one call."""
    for at, value in enumerate(order):
        if nodes[value].kind == "extern":
            group = []
        elif value in is_written and nodes[value].kind != "view":
            group.append(at)
            if len(group) > 1:
                begins |= {order[value]: group[0] for value in group}
                ends |= {order[value]: at for value in group}
    return begins, ends
