"""Slots of a joint graph, on which a plan decides: values either saved for backward or recomputed in it.

torch saves the values nearest to backward, such as the normalised tensor of a layer norm. The residual stream, from
which fused arithmetic alone computes that tensor, serves as well: it has the same size, and the next blocks can be
recomputed from it. So the slot of such a value is the value that it was computed from. Results of extern kernels from
which a larger slot is computed are slots as well: under autocast, products of 16 bits that are added to a residual
stream of 32 bits.

A block that is compiled by itself has such values as inputs. They are saved wherever a value is computed from them.

On a CPU, inductor vectorises a fused loop at the width of 16-bit elements if every kernel that was fused into it has
16-bit values, else at the width of 32-bit elements, which halves the number of partial sums of each row (torch 2.13,
`TilingSelect` in `torch/_inductor/codegen/cpp.py`). Sums over a row then add up in another order. A fused kernel also
reads 16-bit values that it computes itself before they are rounded. So a graph with 16-bit values, as under autocast,
keeps the kernels that it has without a plan, and values that backward recomputes get kernels of their own
(`plain_kernels.py`). Forward has to write a value that is saved, so a value that torch's forward does not write is no
slot. A value that forward does not read itself, such as the mask of a last ReLU, is always saved: without the value,
forward would have another kernel in its place, which sums in another order.

On a CPU, a fused loop that reads a transposed value is vectorised over other dimensions than a loop that reads the
result from memory, and sums in another order. So a value that fused arithmetic computes from a transposed value, as in
an MLP over tokens, is a slot only if torch's forward writes it too. A value that is summed together with transposed
values, and that forward writes only because torch saves it, is always saved.

In a graph with convolutions, inductor stores values in the channels-last format, but outputs of forward in the format
that eager mode gives them. Several threads share a sum over a channel or not, depending on the format of what the sum
reads (torch 2.13, `LoopNest.max_parallel_depth` in `torch/_inductor/codegen/cpp.py`). So a value that fused arithmetic
computes from an output, such as the mask of a last ReLU, is always saved: recomputed, it would have the other format.
So is a convolution's argument that is computed from inputs of the graph alone, such as images or weights in 16 bits:
the inputs would be saved as copies in the channels-last format.

Small reductions are always saved, except those that torch computes again in backward, such as the sums of a softmax
over three labels. Those are fused into the loop over the labels, which is too short to be vectorised on a CPU; read
from memory, their logarithm would be taken in a vectorised loop, and vectorised logarithms sometimes round
differently. For the same reason the logarithm of a sum that torch saves is always saved, not the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lowtide._torch.joint_graph import JointGraph

SMALL = 64
"""Values that are smaller than the largest by at least this factor are always saved: recomputing them would gain
nothing.
"""


_NAMES = """
acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p log2 pow
sigmoid sin sinh tan tanh
"""
APPROXIMATED = frozenset(f"aten.{name}" for name in _NAMES.split())
"""Functions for which a vectorised loop on a CPU has other code than a scalar one, which rounds differently."""

CONVOLUTION = "aten.convolution"

TRANSPOSING = frozenset({"aten.permute", "aten.t", "aten.transpose"})


@dataclass(frozen=True, slots=True)
class JointSlot:
    """A value of a joint graph (forward and backward of compiled code) that may be saved for backward."""

    node: int
    address: str
    """Path of the module that computes the value, and the value's ordinal in it: `transformer.h.3.mlp.c_fc#0:1`."""
    is_kept: bool
    """True if every plan keeps the value: because it is small or random, or because a recompute could change bits."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Values of a joint graph that backward reads: `given` are saved by forward, `again` are recomputed in backward.

    Both hold indices of nodes.
    """

    given: frozenset[int]
    again: frozenset[int]


class JointSlots:
    """The slots of one joint graph: values that a plan may save for backward.

    `plain` are the indices of the nodes whose values torch saves without a plan.
    """

    def __init__(self, joint: JointGraph, plain: frozenset[int], *, is_named: bool = False) -> None:
        """Find the slots. With `is_named`, addresses begin with the graph's hash, because several graphs may contain
        the same module paths.
        """
        self.joint, self.plain, self._is_named = joint, plain, is_named
        nodes = joint.nodes
        held = {nodes[i].root for i in joint.forward_outputs}
        roots = {nodes[i].root for i in plain if nodes[nodes[i].root].kind != "input"} - held
        self.roots = frozenset(roots)
        """Saved values of torch that own their memory."""
        largest = max((nodes[at].bytes for at in (*roots, *(i for i in plain if nodes[i].is_given))), default=0)
        self._small = largest // SMALL
        self._is_mixed = any(node.is_half for node in nodes)
        self.kept_apart = self.roots if self._is_mixed else frozenset[int]()
        """Values saved by torch that are written to memory even if a plan recomputes them."""
        self._kept: set[int] = set()
        """Slots that every plan keeps."""
        upstream = {root: self._find_upstream(root, held) for root in sorted(roots)}
        saved = set(upstream.values()) - plain
        saved |= {node for node in upstream.values() if nodes[node].kind != "input"}
        saved |= self._find_smaller_sources(saved - held)
        random = {i for i, n in enumerate(nodes) if n.is_random and n.bytes and not n.is_backward}
        reduced = {
            i
            for i, n in enumerate(nodes)
            if n.is_forward and n.kind == "reduction" and n.root == i and 0 < n.bytes <= self._small
        } - held.union(self.as_torch().again)
        outputs = held - plain if any(node.target == CONVOLUTION for node in nodes) else set[int]()
        for node in sorted(saved | random | reduced):
            is_small = nodes[node].kind == "input" or nodes[node].bytes <= self._small
            changes_bits = self._follows_sum(node) or self._changes_loop_of_sum(node) or self._is_for_backward(node)
            if (
                node in random
                or is_small
                or changes_bits
                or self._find_fused_values(node) & outputs
                or self._is_cast_for_convolution(node)
            ):
                self._kept.add(node)
        same = {root for root, node in upstream.items() if root == node}
        self._near = frozenset(i for i in plain if nodes[i].root in same)
        self._fixed = frozenset(i for i in plain if nodes[i].root not in roots)
        read = self._split_values(self._kept.union(self._fixed)).given - plain
        inputs = {i for i in read if nodes[i].is_given and nodes[i].bytes > self._small}
        self._kept |= inputs
        at = _list_addresses(joint, f"{joint.key}/" if is_named else "")
        self.slots = tuple(
            JointSlot(node=node, address=at[node], is_kept=node in self._kept)
            for node in sorted(saved | random | reduced | inputs)
        )

    def at(self, sizes: tuple[int, ...]) -> JointSlots:
        """Return the slots of the graph with `sizes` as the values of its symbolic sizes."""
        if self.joint.resize is None:
            return self
        return JointSlots(self.joint.at(sizes), self.plain, is_named=self._is_named)

    def named(self) -> JointSlots:
        """Return the same slots with addresses that begin with the graph's hash."""
        return JointSlots(self.joint, self.plain, is_named=True)

    def as_torch(self) -> Recomputed:
        """Return the saved and recomputed values as torch chooses them."""
        return self._split_values(self.plain)

    def without(self, addresses: Collection[str]) -> Recomputed:
        """Return the saved and recomputed values if all slots are saved except those at `addresses`."""
        nodes = self.joint.nodes
        kept = {slot.node for slot in self.slots if slot.is_kept or slot.address not in addresses}
        as_torch = (i for i in self._near if nodes[i].root in kept)
        return self._split_values(kept.union(self._fixed, as_torch))

    def _split_values(self, kept: Iterable[int]) -> Recomputed:
        joint, nodes, kept = self.joint, self.joint.nodes, frozenset(kept)
        given, again = set[int](), set[int]()
        pending = [arg for node in nodes if node.is_backward for arg in node.args] + joint.backward_outputs
        while pending:
            at = pending.pop()
            node = nodes[at]
            if node.is_backward or node.is_tangent or at in again or at in given:
                continue
            if at in kept or node.kind == "input":
                given.add(at)
            else:
                again.add(at)
                pending += node.args
        return Recomputed(frozenset(given), frozenset(again))

    def _find_upstream(self, root: int, held: Collection[int]) -> int:
        """Return the farthest value upstream that may be saved in place of `root`; `root` itself if there is none.

        That value is no larger than `root`, and fused arithmetic alone computes `root` from it.
        """
        nodes, source = self.joint.nodes, root
        while nodes[root].kind == "pointwise" and nodes[root].bytes > self._small and not self._follows_sum(root):
            large = {nodes[arg].root for arg in nodes[root].args if nodes[nodes[arg].root].bytes > self._small}
            large = {arg for arg in large if nodes[arg].kind != "input" or nodes[arg].is_given}
            if len(large) != 1 or (self._is_mixed and nodes[root].target == "aten.embedding"):
                break
            (operand,) = large
            node = nodes[operand]
            if operand in held or node.bytes > nodes[root].bytes or node.is_random:
                break
            if "random" in node.target:
                break
            root = operand
            if not (self._is_mixed or self._reads_transposed(root)) or self._is_written(root):
                source = root
        return source

    def _find_smaller_sources(self, slots: Collection[int]) -> set[int]:
        """Return the 16-bit results of extern kernels from which one of `slots` is computed that takes more memory.

        Under autocast a normalised tensor of 32 bits is computed from products of 16 bits. Small 32-bit products, such
        as the keys that several heads share, are left out: the kernels that inductor makes of them are not forecast.
        """
        nodes, sources = self.joint.nodes, set[int]()
        for slot in slots:
            pending, reached = [slot] if nodes[slot].kind == "pointwise" else [], {slot}
            while pending:
                for arg in nodes[pending.pop()].args:
                    root = nodes[arg].root
                    if nodes[arg].kind == "input" or arg in reached:
                        continue
                    reached.add(arg)
                    if nodes[arg].kind != "extern":
                        pending.append(arg)
                    elif nodes[root].is_half and self._small < nodes[root].bytes < nodes[slot].bytes:
                        sources.add(root)
        return sources.difference(slots)

    def _follows_sum(self, node: int) -> bool:
        """Return True if `node` applies a function such as a logarithm, which a vectorised loop rounds differently, to
        the result of a reduction.
        """
        nodes = self.joint.nodes
        return nodes[node].target in APPROXIMATED and any(nodes[arg].kind == "reduction" for arg in nodes[node].args)

    def _find_fused_values(self, slot: int) -> set[int]:
        """Return `slot` and the values from which one fused kernel of elementwise operators and views computes it.

        Among them are the values that the kernel reads: those that every plan keeps, and results of other kernels.
        """
        nodes, pending, fused = self.joint.nodes, [slot], set[int]()
        while pending:
            at = pending.pop()
            if at not in fused and at not in self._kept and nodes[at].kind in ("pointwise", "view"):
                pending += nodes[at].args
            fused.add(at)
        return fused

    def _reads_transposed(self, root: int) -> bool:
        """Return True if fused arithmetic computes the value from a transposed value."""
        return any(self.joint.nodes[at].target in TRANSPOSING for at in self._find_fused_values(root))

    def _changes_loop_of_sum(self, slot: int) -> bool:
        """Return True if a sum over transposed values reads the slot from memory only because it is saved."""
        nodes = self.joint.nodes
        if nodes[slot].kind != "pointwise" or self._is_read_by_extern(slot):
            return False
        pending, reached = [slot], set[int]()
        while pending:
            for user in nodes[pending.pop()].users:
                if nodes[user].is_backward or user in reached:
                    continue
                reached.add(user)
                if nodes[user].kind == "reduction" and any(map(self._reads_transposed, nodes[user].args)):
                    return True
                if nodes[user].kind in ("pointwise", "view"):
                    pending.append(user)
        return False

    def _is_for_backward(self, slot: int) -> bool:
        """Return True if the graph has 16-bit values, and a kernel writes this value only to save it for backward."""
        node = self.joint.nodes[slot]
        return self._is_mixed and node.kind == "pointwise" and not node.is_forward

    def _is_cast_for_convolution(self, slot: int) -> bool:
        """Return True if a convolution reads the slot, which is computed from inputs of the graph alone."""
        nodes = self.joint.nodes
        is_convolved = any(nodes[user].target == CONVOLUTION for user in nodes[slot].users)
        return is_convolved and all(
            nodes[at].kind in ("pointwise", "view", "input") for at in self._find_fused_values(slot)
        )

    def _is_written(self, root: int) -> bool:
        """Return True if the forward that inductor compiles without a plan writes the value of node `root` to
        memory.
        """
        is_fused = self.joint.nodes[root].kind == "pointwise" and root not in self.roots  # inputs are in memory as well
        return not is_fused or self._is_read_by_extern(root)

    def _is_read_by_extern(self, value: int) -> bool:
        """Return True if an extern kernel of forward, which reads from memory, reads the value."""
        nodes, pending = self.joint.nodes, [value]
        while pending:
            users = [user for user in nodes[pending.pop()].users if not nodes[user].is_backward]
            if any(nodes[user].kind == "extern" for user in users):
                return True
            pending += [user for user in users if nodes[user].kind == "view"]
        return False


def _list_addresses(joint: JointGraph, name: str) -> list[str]:
    count: Counter[str] = Counter()
    addresses = []
    for index, node in enumerate(joint.nodes):
        if node.kind == "input":
            addresses.append(f"{name}input#0:{index}")
            continue
        addresses.append(f"{name}{node.module}#0:{count[node.module]}")
        count[node.module] += not node.is_backward
    return addresses
