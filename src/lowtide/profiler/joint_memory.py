"""Computation of the bytes in memory at each call of a compiled graph, from its joint graph.

A value takes memory where inductor has to write it: results of extern kernels and reductions, arguments of extern
kernels, and outputs. All other values exist within fused kernels only. The order is that of the joint graph; recomputed
values come right before the first call that needs them, or in the kernel of a later gradient that reads the same
values. A fused kernel has its inputs in memory together with all its outputs; one with a single output writes over an
input of its size that nothing else reads. Not modelled is inductor's reordering. Scratch memory of extern kernels is
measured (`compiled_profile.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lowtide._torch.joint_graph import JointGraph
from lowtide.runtime.joint_slots import Recomputed

NONE: Final[Mapping[int, int]] = {}


@dataclass(frozen=True, slots=True)
class Half:
    """Forward or backward half of a joint graph. Positions are its calls, and one more for its end."""

    levels: tuple[int, ...]
    """Bytes at each position, relative to the beginning of the half."""
    born: dict[int, int]
    """Position that allocates each value that takes memory."""
    first: dict[int, int]
    """First position that reads each value."""
    last: dict[int, int]
    """Last position that reads each value."""


def forward_half(joint: JointGraph, recomputed: Recomputed, scratch: Mapping[int, int] = NONE) -> Half:
    """Return the forward half, whose saved values are those that `recomputed` names.

    Args:
        joint: The graph.
        recomputed: Values that are saved, and values that are computed again.
        scratch: Scratch memory of extern kernels, by node.
    """
    nodes = joint.nodes
    outputs = [*joint.forward_outputs, *(i for i in recomputed.given if nodes[i].kind != "input")]
    return _half(joint, upstream(joint, outputs), (), outputs, scratch)


def backward_half(joint: JointGraph, recomputed: Recomputed, scratch: Mapping[int, int] = NONE) -> Half:
    """Return the backward half, which frees each saved value after its last read. Arguments as for `forward_half`."""
    nodes = joint.nodes
    given = {nodes[i].root for i in recomputed.given} | {i for i, node in enumerate(nodes) if node.is_tangent}
    given = {root for root in given if nodes[root].kind != "input" or nodes[root].is_tangent}
    order = _fused_order(joint, _backward_order(joint, recomputed.again))
    return _half(joint, order, given, joint.backward_outputs, scratch)


def scratch_of(
    joint: JointGraph, torchs_own: Recomputed, transients: tuple[Sequence[int], Sequence[int]]
) -> dict[int, int]:
    """Return the scratch memory of products of 16-bit values, which are summed in 32 bits.

    Args:
        joint: The graph.
        torchs_own: torch's own partition, under which the step was recorded.
        transients: Sizes of the blocks that forward and backward freed right after their allocation.
    """
    outputs = [*joint.forward_outputs, *torchs_own.given]
    orders = upstream(joint, outputs), _backward_order(joint, torchs_own.again)
    scratch = dict[int, int]()
    for order, sizes in zip(orders, transients, strict=True):
        nodes = [
            n for n in order if joint.nodes[n].kind == "extern" and joint.nodes[n].is_half and joint.nodes[n].bytes
        ]
        if len(nodes) == len(sizes):  # larger products have larger scratch memory
            scratch |= dict(zip(sorted(nodes, key=lambda n: joint.nodes[n].bytes), sorted(sizes), strict=True))
    return scratch


def upstream(joint: JointGraph, ends: Iterable[int]) -> list[int]:
    """Return the values `ends` and all values from which they are computed, in order."""
    reached, pending = set[int](), list(ends)
    while pending:
        node = pending.pop()
        if node not in reached and joint.nodes[node].kind != "input":
            reached.add(node)
            pending += joint.nodes[node].args
    return sorted(reached)


def _backward_order(joint: JointGraph, again: Collection[int]) -> list[int]:
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


def _fused_order(joint: JointGraph, order: list[int]) -> list[int]:
    """Return `order` with values in the kernels of later gradients that read the same memory.

    Inductor fuses such kernels across extern kernels on which neither depends: the recomputed output of an activation
    and its gradient, for example. The readers of both come after them.
    """
    is_written, inside = written(joint, order, joint.backward_outputs), set(order)
    kernels = {at: _fused_reads(joint, at, inside, is_written) for at in order if at in is_written}
    for value in reversed(kernels):
        order = _moved_to_gradient(joint, order, value, kernels)
    return order


def _moved_to_gradient(joint: JointGraph, order: list[int], value: int, kernels: Mapping[int, set[int]]) -> list[int]:
    nodes, at = joint.nodes, order.index(value)
    if nodes[value].kind != "pointwise":
        return order
    following, inside = order[at + 1 :], set(order)
    later, pending = {value}, [value]
    while pending:
        users = [user for user in nodes[pending.pop()].users if user in inside and user not in later]
        later.update(users)
        pending += users
    reads = {root for root in kernels[value] if 2 * nodes[root].bytes >= nodes[value].bytes}
    is_apart = False
    for place, other in enumerate(following):
        is_apart |= nodes[other].kind == "extern"
        if other in later or not nodes[other].is_backward or reads.isdisjoint(kernels.get(other, ())):
            continue
        if not is_apart:
            return order
        end = next((n for n in range(place, len(following)) if nodes[following[n]].kind == "extern"), len(following))
        stay = [node for node in following[:end] if node not in later]
        after = [node for node in following[:end] if node in later]
        kernel = stay.index(other)
        return [*order[:at], *stay[:kernel], value, *stay[kernel:], *after, *following[end:]]
    return order


def _fused_reads(joint: JointGraph, value: int, inside: Collection[int], is_written: Collection[int]) -> set[int]:
    """Return the values in memory that the kernel of a value reads, except parameters; none for extern kernels."""
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
    into = _into_sums(joint, inside, outputs)
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


def _into_sums(joint: JointGraph, inside: Collection[int], outputs: Collection[int]) -> dict[int, int]:
    """Return the matrix products that inductor fuses into a following sum (`addmm`), with these sums.

    Product and sum are one call then, at the place of the sum; the product's operands stay in memory until there.
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


def _half(
    joint: JointGraph,
    order: Sequence[int],
    given: Collection[int],
    outputs: Collection[int],
    scratch: Mapping[int, int],
) -> Half:
    nodes, place = joint.nodes, {value: at for at, value in enumerate(order)}
    is_written = written(joint, order, outputs)
    begins, ends = _kernels(joint, order, is_written)
    first, last = _reads(joint, order, is_written, begins, ends)
    only, only_last = _reads(joint, order, is_written, {}, {})
    for value in outputs:
        last[nodes[value].root] = len(order)
    forward_outputs = {nodes[value].root for value in joint.forward_outputs}  # their memory is not backward's
    own = {*is_written, *(root for root in given if not nodes[root].is_tangent)} - forward_outputs
    over = set[int]()
    for root in sorted(own & only.keys()):
        if only[root] != only_last[root] or last[root] == len(order):
            continue
        writer = order[only[root]]  # writes over the input that nothing else reads
        is_fused = nodes[writer].kind == "pointwise" and writer in is_written and writer not in {*over, *begins}
        if is_fused and nodes[writer].bytes == nodes[root].bytes:
            over.add(writer)
            last[root] = place[writer] - 1
    for writer in [value for value, end in ends.items() if place[value] == end and nodes[value].kind == "pointwise"]:
        reads = _fused_reads(joint, writer, place, is_written) & own  # the last output may go over an input as well
        for root in sorted(reads):
            if last.get(root) == place[writer] and nodes[root].bytes == nodes[writer].bytes:
                last[root], begins[writer] = place[writer] - 1, place[writer]
                break
    changes = [0] * (len(order) + 2)
    for root in given:
        changes[min(last.get(root, -1), len(order)) + 1] -= nodes[root].bytes
    born = {value: begins.get(value, place[value]) for value in is_written}
    for value, at in born.items():
        changes[at] += nodes[value].bytes
        end = last.get(value, ends.get(value, at))
        if end < len(order):
            changes[end + 1] -= nodes[value].bytes
    levels, level = list[int](), 0
    for value, change in zip((*order, -1), changes, strict=False):
        level += change
        levels.append(level + scratch.get(value, 0))
    return Half(tuple(levels), born, first, last)


def _reads(
    joint: JointGraph,
    order: Sequence[int],
    is_written: Collection[int],
    begins: Mapping[int, int],
    ends: Mapping[int, int],
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first and last position at which each value is read."""
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


def _kernels(
    joint: JointGraph, order: Sequence[int], is_written: Collection[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Return the first and last position of the fused kernel that writes each value, if it writes several.

    Inductor fuses calls that follow each other where one reads what the other computes. A kernel's inputs are in memory
    together with all its outputs.
    """
    nodes = joint.nodes
    begins, ends = dict[int, int](), dict[int, int]()
    kernel: dict[int, list[int]] = {}
    """Positions of the values that are written by the kernel in which a value is computed."""
    for at, value in enumerate(order):
        if nodes[value].kind == "extern":
            kernel = {}
        if nodes[value].kind not in ("pointwise", "reduction"):
            continue
        inside = [kernel[nodes[arg].root] for arg in nodes[value].args if nodes[arg].root in kernel]
        mine = inside[0] if inside else []
        for other in inside[1:]:
            if other is not mine:
                mine.extend(other)
                kernel.update({known: mine for known, its in kernel.items() if its is other})
        kernel[value] = mine
        if value in is_written:
            mine.append(at)
        if len(mine) > 1:
            begins |= {order[each]: min(mine) for each in mine}
            ends |= {order[each]: max(mine) for each in mine}
    return begins, ends
