"""Joint graphs (forward and backward of code that torch.compile compiles together), as records without torch.

Read in torch 2.13 (`torch/_functorch/partitioners.py`); the hook exists since 2.9. torch's partitioner is called with
its choice of saved values replaced; extraction, reordering and threading through stay torch's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

import torch
from torch import fx

from lowtide._torch.kernel_fusion import fuse_nearby_only
from lowtide._torch.plain_kernels import with_plain_backward, write_as_plain

Kind = Literal["input", "view", "pointwise", "reduction", "extern"]


@dataclass(slots=True)
class JointNode:
    """A node of a joint graph: an input, or a call of an operator. Other records refer to it by its index in
    `JointGraph.nodes`.
    """

    target: str
    """Name of the called operator, such as `aten.mm`; `placeholder` for an input."""
    kind: Kind
    bytes: int
    flops: int
    args: tuple[int, ...]
    module: str
    """Path of the calling module, or empty."""
    root: int
    """Index of the node whose memory this node's value is in."""
    is_forward: bool
    """True if forward outputs need the node."""
    is_backward: bool
    """True if the node depends on gradients of the outputs."""
    is_tangent: bool = False
    is_static: bool = False
    """True for a parameter or buffer, which the model holds."""
    is_random: bool = False
    """True if a second call would give other random numbers."""
    is_half: bool = False
    """True for a floating-point value of 16 bits or less per element."""
    is_copied: bool = False
    """True for an input that inductor copies to the channels-last format if it is saved for backward."""
    users: list[int] = field(default_factory=list)

    @property
    def is_given(self) -> bool:
        """Return True if the node is an input of forward that changes from step to step, such as the batch."""
        return self.kind == "input" and not (self.is_static or self.is_tangent)


@dataclass(slots=True, eq=False)
class JointGraph:
    """Forward and backward of one compiled graph."""

    nodes: list[JointNode]
    forward_outputs: list[int]
    backward_outputs: list[int]
    key: str
    """Hash of each call's target and inputs, in order: equal for compiles of one graph, whatever the sizes."""
    resize: Callable[[JointGraph, tuple[int, ...]], JointGraph] | None = None
    """Function that returns the graph for other values of its symbolic sizes; None if all sizes are fixed."""
    is_on_cpu: bool = True

    def at(self, sizes: tuple[int, ...]) -> JointGraph:
        """Return the graph for these values of its symbolic sizes: the integer inputs of its forward, in order."""
        return self if self.resize is None else self.resize(self, sizes)

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            for arg in node.args:
                self.nodes[arg].users.append(index)


Choose = Callable[[JointGraph, frozenset[int]], frozenset[int]]
"""Function that is called with a joint graph and the indices of the nodes whose values torch would save for backward;
it returns the indices of the nodes to save instead.
"""

_REDUCTIONS: Final = frozenset(
    {
        "aten.sum",
        "aten.mean",
        "aten.amax",
        "aten.amin",
        "aten.var_mean",
        "aten.any",
        "aten.argmax",
        "aten.prod",
        "aten.var",
        "prims.sum",
        "prims.var",
        "prims.prepare_softmax_online",
    }
)
_VIEWS: Final = frozenset(
    {
        "aten.view",
        "aten.permute",
        "aten.expand",
        "aten.slice",
        "aten.unsqueeze",
        "aten.squeeze",
        "aten.t",
        "aten.transpose",
        "aten.select",
        "aten.split",
        "aten.split_with_sizes",
        "aten.as_strided",
        "aten.alias",
        "aten.detach",
        "aten.reshape",
        "aten._unsafe_view",
        "prims.broadcast_in_dim",
    }
)
_FUSED: Final = frozenset(
    {
        "prims.fma",
        "prims.inductor_random",
        "prims.inductor_randint",
        "prims.inductor_lookup_seed",
        "aten.constant_pad_nd",
        "aten.embedding",
        "aten.select_scatter",
        "aten.slice_scatter",
    }
)
_SIZES: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SEEDS: Final = frozenset(
    {
        "prims.inductor_seed",
        "prims.inductor_seeds",
    }
)


def unfuse_addmm(gm: fx.GraphModule) -> None:
    """Keep inductor from fusing `mm` and `add` into `addmm`, so that each product stays at its own place in the graph.

    The `addmm` would be at the place of the `add`. `x - (-y)` equals `x + y` bit for bit, and is not fused because it
    is no `add`. Read in torch 2.13 (`torch/_inductor/fx_passes/post_grad.py`).
    """
    aten = torch.ops.aten
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if len(node.args) != 2 or node.kwargs:
            continue
        for product, other in (node.args, node.args[::-1]):
            is_product = isinstance(product, fx.Node) and product.target is aten.mm.default
            if not (is_product and isinstance(other, fx.Node) and len(product.users) == 1):
                continue
            with gm.graph.inserting_before(node):
                minus = gm.graph.call_function(aten.neg.default, (other,))
                total = gm.graph.call_function(aten.sub.Tensor, (product, minus))
            minus.meta = {**node.meta, "val": other.meta["val"]}
            total.meta = dict(node.meta)
            node.replace_all_uses_with(total)
            gm.graph.erase_node(node)
            break
    gm.recompile()


def partitioned(
    gm: fx.GraphModule, joint_inputs: Any, choose: Choose, **settings: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph as torch does, but save the values that `choose` returns; return the graphs of forward
    and backward.
    """
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")  # the first import takes a second
    stock = partitioners.choose_saved_values_set
    planned: list[_Planned] = []

    def chosen(graph: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
        plain: list[fx.Node] = stock(graph, info, memory_budget=memory_budget)
        with _keep_symbolic(gm):
            joint = _build_joint_graph(gm, info, settings["num_fwd_outputs"])
        nodes = [node for node in gm.graph.nodes if node.op != "output"]
        index = {node: i for i, node in enumerate(nodes)}
        before = frozenset(index[node] for node in plain)
        after = choose(joint, before)
        if after == before:
            return plain
        planned.append(_Planned.of(joint, [node.name for node in nodes], before - after))
        return [nodes[i] for i in sorted(after)]

    def both() -> tuple[fx.GraphModule, fx.GraphModule]:
        return cast(
            "tuple[fx.GraphModule, fx.GraphModule]",
            partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **settings),
        )

    partitioners.choose_saved_values_set = chosen
    try:
        forward, backward = both()
        for plan in planned:
            if plan.is_mixed:
                partitioners.choose_saved_values_set = stock
                _, plain_backward = both()
                write_as_plain(forward, plan.unsaved)
                with_plain_backward(backward, plain_backward, plan.unsaved, plan.views)
            else:
                fuse_nearby_only(backward)
        return forward, backward
    finally:
        partitioners.choose_saved_values_set = stock


@dataclass(frozen=True, slots=True)
class _Planned:
    """The values of a joint graph that torch would save for backward and a plan does not, by their nodes' names."""

    is_mixed: bool
    """True if the graph has 16-bit values."""
    unsaved: frozenset[str]
    """Names of the nodes whose values torch would save and the plan does not, if fused kernels compute them."""
    views: frozenset[str]
    """Names of all nodes of the graph that are views."""

    @classmethod
    def of(cls, joint: JointGraph, names: list[str], unsaved: Collection[int]) -> _Planned:
        nodes = joint.nodes
        roots = {nodes[at].root for at in unsaved}
        return cls(
            is_mixed=any(node.is_half for node in nodes),
            unsaved=frozenset(names[at] for at in roots if nodes[at].kind in ("pointwise", "reduction")),
            views=frozenset(name for name, node in zip(names, nodes, strict=True) if node.kind == "view"),
        )


def _keep_symbolic(gm: fx.GraphModule) -> contextlib.AbstractContextManager[Any]:
    """Keep symbolic sizes symbolic inside this `with` block, even if numbers are computed from them.

    Without the block, converting a symbolic size to a number adds a guard, and the compiled code would be for the
    present size only.
    """
    values = (node.meta.get("val") for node in gm.graph.nodes)
    size = next((value for value in values if isinstance(value, torch.SymInt)), None)
    return contextlib.nullcontext() if size is None else size.node.shape_env.suppress_guards()


def _build_joint_graph(gm: fx.GraphModule, info: Any, num_fwd_outputs: int) -> JointGraph:
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    forward, backward, _, _ = partitioners._extract_fwd_bwd_outputs(gm, num_fwd_outputs=num_fwd_outputs)
    operators = partitioners.get_default_op_list()
    index: dict[fx.Node, int] = {}
    nodes: list[JointNode] = []
    numbers: dict[int, int] = {}
    """Number of each call, by the node's index. The hash names calls by it: symbolic sizes are extra inputs, which
    shift indices.
    """
    sizes: set[int] = set()
    """Indices of symbolic sizes and of values computed from them."""
    digest = hashlib.blake2b(digest_size=8)
    after_tangents = _find_backward_nodes(gm, info, partitioners)
    before_convolutions = _find_before_convolutions(gm, after_tangents)
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        at = index[node] = len(nodes)
        args = tuple(dict.fromkeys(index[arg] for arg in node.all_input_nodes))
        target, is_size = _name_target(node), isinstance(node.meta.get("val"), _SIZES)
        kind = "input" if is_size else _classify(node, target, operators)
        is_view = kind == "view" and bool(args)
        nodes.append(
            JointNode(
                target=target,
                kind=kind,
                bytes=_count_bytes(node, partitioners),
                flops=_count_flops(node, kind, partitioners),
                args=args,
                module=_find_module_path(node),
                root=nodes[args[0]].root if is_view else at,
                is_forward=node in info.required_fw_nodes,
                is_backward=node in after_tangents and kind != "input",
                is_tangent=node.op == "placeholder" and "tangents" in node.name,
                is_static=node in info.static_lifetime_input_nodes,
                is_half=_is_half(node.meta.get("val")),
                is_copied=node.op == "placeholder" and node in before_convolutions and _is_planar(node.meta.get("val")),
                is_random=target in _SEEDS or (kind == "extern" and _draws_numbers(node, operators)),
            )
        )
        if is_size:
            sizes.add(at)
        elif node.op == "call_function":
            digest.update(f"{target} {[numbers.get(arg, -1) for arg in args if arg not in sizes]}\n".encode())
            numbers[at] = len(numbers)
    outputs, gradients = ([index[node] for node in ends if node in index] for ends in (forward, backward))
    inside = (node.meta.get("val") for node in gm.graph.nodes)
    is_on_cpu = all(value.is_cpu for value in inside if isinstance(value, torch.Tensor))
    return JointGraph(nodes, outputs, gradients, digest.hexdigest(), _make_resize(gm), is_on_cpu)


def _find_backward_nodes(gm: fx.GraphModule, info: Any, partitioners: Any) -> Collection[fx.Node]:
    """Return the nodes that can only be computed in backward. Relies on internals of torch 2.13; in 2.10 `info` does
    not hold these nodes.
    """
    if (known := getattr(info, "tangents_closure", None)) is not None:
        return cast("Collection[fx.Node]", known)
    nodes: set[fx.Node] = set()
    for node in gm.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or partitioners._must_be_in_backward(node) or not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def _find_before_convolutions(gm: fx.GraphModule, after_tangents: Collection[fx.Node]) -> Collection[fx.Node]:
    """Return the convolutions of forward, and the nodes from which they are computed.

    Inductor stores their values in the channels-last format (torch 2.13, `find_nodes_prefer_channels_last` in
    `torch/_inductor/graph.py`).
    """
    nodes = set[fx.Node]()
    for node in reversed(gm.graph.nodes):
        is_convolution = node.target is torch.ops.aten.convolution.default
        if node not in after_tangents and (is_convolution or not nodes.isdisjoint(node.users)):
            nodes.add(node)
    return nodes


def _is_planar(value: object) -> bool:
    """Return True for a four-dimensional tensor that is not in the channels-last format."""
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.stride(1) != 1


def _make_resize(gm: fx.GraphModule) -> Callable[[JointGraph, tuple[int, ...]], JointGraph] | None:
    """Make the function that computes a joint graph's bytes and FLOPs at other symbolic sizes; None if sizes are fixed.

    FLOPs grow in proportion to the result's bytes, which gives too few for attention over a longer sequence.
    """
    given = [node.meta["val"] for node in gm.graph.nodes if _is_given_size(node)]
    if not given:
        return None
    inside = [node.meta.get("val") for node in gm.graph.nodes if node.op != "output"]
    tensors = {at: value for at, value in enumerate(inside) if isinstance(value, torch.Tensor)}
    numels: dict[int, Any] = {
        at: value.numel() for at, value in tensors.items()
    }  # typed as int, but it may be a SymInt
    symbolic = {
        at: (numel.node.expr, tensors[at].element_size())
        for at, numel in numels.items()
        if isinstance(numel, torch.SymInt)
    }
    symbols = [size.node.expr for size in given]

    def resize(joint: JointGraph, sizes: tuple[int, ...]) -> JointGraph:
        known = dict(zip(symbols, sizes, strict=False))

        def resized(at: int, node: JointNode) -> JointNode:
            number, width = symbolic.get(at, (None, 0))
            number = None if number is None else number.subs(known)
            if number is None or not number.is_number:
                return replace(node, users=[])
            n_bytes = int(number) * width
            return replace(node, bytes=n_bytes, flops=node.flops * n_bytes // max(node.bytes, 1), users=[])

        nodes = [resized(at, node) for at, node in enumerate(joint.nodes)]
        return replace(joint, nodes=nodes, resize=None)

    return resize


def _is_given_size(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt) and "tangents" not in node.name


def _name_target(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.op)
    if node.target is operator.getitem:
        return "getitem"
    return str(getattr(node.target, "overloadpacket", node.target))


def _classify(node: fx.Node, target: str, operators: Any) -> Kind:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if target == "getitem":
        source = _name_target(node.args[0]) if isinstance(node.args[0], fx.Node) else ""
        return "view" if source in _VIEWS else "reduction" if source in _REDUCTIONS else "extern"
    if target in _VIEWS:
        return "view"
    if target in _REDUCTIONS:
        return "reduction"
    is_fused = target in _FUSED or (operators.is_fusible(node) and not _draws_numbers(node, operators))
    return "pointwise" if is_fused else "extern"


def _draws_numbers(node: fx.Node, operators: Any) -> bool:
    """Return True if the node is a random operator or an output of one. Attention without dropout is not random."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _draws_numbers(node.args[0], operators)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not operators.is_random(node) and torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    places = {argument.name: place for place, argument in enumerate(node.target._schema.arguments)}
    if "dropout_p" not in places:
        return True
    place = places["dropout_p"]
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def _is_half(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() <= 2


def _count_bytes(node: fx.Node, partitioners: Any) -> int:
    value = node.meta.get("val")
    return 0 if value is None or isinstance(value, (tuple, list, *_SIZES)) else int(partitioners._size_of(node))


def _count_flops(node: fx.Node, kind: Kind, partitioners: Any) -> int:
    """Return the FLOPs of a matrix product, convolution or attention. torch counts none for the CPU's attention."""
    if kind != "extern" or node.op != "call_function" or node.target is operator.getitem:
        return 0
    try:
        flops = int(partitioners.estimate_runtime(node))
    except Exception:  # torch's counter does not handle the operator's shapes
        flops = 0
    if flops <= 1 and "scaled_dot_product" in str(node.target):
        query, key = (
            (node.args[0], node.args[1]) if "backward" not in str(node.target) else (node.args[1], node.args[2])
        )
        *rows, length, width = query.meta["val"].shape  # type: ignore[union-attr]
        passes = 2 if "backward" not in str(node.target) else 5
        flops = 2 * passes * length * int(key.meta["val"].shape[-2]) * width  # type: ignore[union-attr]
        for size in rows:
            flops *= size
        flops = int(flops)
    return flops if flops > 1 else 0


_STEP = re.compile(r"\._modules\['([^']*)'\]|\['([^']*)'\]|\[(\d+)\]")


def _find_module_path(node: fx.Node) -> str:
    """Return the path of the module that `node` belongs to, such as `transformer.h.0.attn`; empty if torch does not
    record one.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = _STEP.sub(lambda match: "." + next(group for group in match.groups() if group is not None), path)
    parts = path.removeprefix("L.").split(".")
    return ".".join(part for part in parts[1:] if part and part != "_orig_mod")
