"""Joint graphs written by hand."""

from lowtide._torch.joint_graph import JointGraph, JointNode, Kind

MANY, FEW = 4096, 8


def node(
    kind: Kind,
    args: tuple[int, ...] = (),
    size: int = MANY,
    *,
    root: int,
    target: str = "aten.op",
    module: str = "",
    backward: bool = False,
    tangent: bool = False,
    random: bool = False,
    half: bool = False,
) -> JointNode:
    return JointNode(
        target=target,
        kind=kind,
        bytes=size,
        flops=0,
        args=args,
        module=module,
        root=root,
        is_forward=not backward and not tangent,
        is_backward=backward,
        is_tangent=tangent,
        is_random=random,
        is_half=half,
    )


def masked(*, half: bool = False) -> JointGraph:
    """Y = mm(x, w) * mask(seed); backward reads the mask, and the normalised product. The product may have 16 bits."""
    return JointGraph(
        [
            node("input", root=0),
            node("extern", (0,), root=1, target="aten.mm", module="fc", half=half),
            node("extern", (), FEW, root=2, target="prims.inductor_seeds", random=True),
            node("pointwise", (2,), MANY // 4, root=3, target="aten.gt", module="drop"),
            node("reduction", (1,), FEW, root=4, module="norm"),
            node("pointwise", (1, 4), root=5, module="norm"),
            node("pointwise", (5, 3), root=6, module="drop"),
            node("input", root=7, tangent=True),
            node("pointwise", (7, 3), root=8, backward=True),
            node("extern", (8, 5), root=9, backward=True, target="aten.mm"),
        ],
        [6],
        [9],
        "key",
    )


def normalised(*, half: bool) -> JointGraph:
    """Y = mm(norm(mm(x) + mm(x))); the sum is within fused kernels only, and the first product may have 16 bits."""
    return JointGraph(
        [
            node("input", root=0),
            node("extern", (0,), root=1, target="aten.mm", module="fc", half=half),
            node("extern", (0,), root=2, target="aten.mm", module="skip"),
            node("pointwise", (1, 2), root=3, module="sum"),
            node("reduction", (3,), FEW, root=4, module="norm"),
            node("pointwise", (3, 4), root=5, module="norm"),
            node("extern", (5,), root=6, target="aten.mm", module="out"),
            node("input", root=7, tangent=True),
            node("extern", (7, 5), root=8, backward=True, target="aten.mm"),
        ],
        [6],
        [8],
        "key",
    )


def block() -> JointGraph:
    """Y = mm(norm(x)) of a block's input x; backward reads the normalised tensor."""
    return JointGraph(
        [
            node("input", root=0),
            node("reduction", (0,), FEW, root=1, module="norm"),
            node("pointwise", (0, 1), root=2, module="norm"),
            node("extern", (2,), root=3, target="aten.mm", module="fc"),
            node("input", root=4, tangent=True),
            node("extern", (4, 2), root=5, backward=True, target="aten.mm"),
        ],
        [3],
        [5],
        "block",
    )


def embedded(*, half: bool) -> JointGraph:
    """Y = mm(norm(table[ids])); the 32-bit embeddings are read again in backward, and the product may have 16 bits."""
    return JointGraph(
        [
            node("input", size=MANY // 2, root=0),
            node("pointwise", (0,), root=1, target="aten.embedding", module="ids"),
            node("reduction", (1,), FEW, root=2, module="norm"),
            node("pointwise", (1, 2), root=3, module="norm"),
            node("extern", (3,), root=4, target="aten.mm", module="out", half=half),
            node("input", root=5, tangent=True),
            node("extern", (5, 4), root=6, backward=True, target="aten.mm"),
            node("pointwise", (6, 1, 2), root=7, backward=True),
        ],
        [4],
        [7],
        "embedded",
    )


def residual(target: str) -> JointGraph:
    """Y = relu(x + op(x)); backward reads the mask of the ReLU, which is computed from y."""
    return JointGraph(
        [
            node("input", root=0),
            node("extern", (0,), root=1, target=target, module="op"),
            node("pointwise", (0, 1), root=2, target="aten.relu"),
            node("pointwise", (2,), MANY // 4, root=3, target="aten.le"),
            node("input", root=4, tangent=True),
            node("pointwise", (3, 4), root=5, backward=True, target="aten.where"),
            node("reduction", (5,), FEW, root=6, backward=True, target="aten.sum"),
        ],
        [2],
        [6],
        "residual",
    )


def classified(*, size: int = FEW) -> JointGraph:
    """L = log(sum(x)) of rows; backward reads the logarithms. The sums have `size` bytes."""
    return JointGraph(
        [
            node("input", root=0),
            node("extern", (0,), root=1, target="aten.mm", module="fc"),
            node("pointwise", (1,), root=2, target="aten.exp", module="loss"),
            node("reduction", (2,), size, root=3, target="aten.sum", module="loss"),
            node("pointwise", (3,), FEW, root=4, target="aten.log", module="loss"),
            node("extern", (4,), FEW, root=5, target="aten.mm"),
            node("input", root=6, tangent=True),
            node("pointwise", (6, 1, 4), root=7, backward=True),
        ],
        [5],
        [7],
        "classified",
    )


def loss_head() -> JointGraph:
    """L = x - log(sum(exp(x))) of rows of an input; backward reads x and the logarithms."""
    return JointGraph(
        [
            node("input", root=0),
            node("pointwise", (0,), root=1, target="aten.exp"),
            node("reduction", (1,), FEW, root=2, target="aten.sum"),
            node("pointwise", (2,), FEW, root=3, target="aten.log"),
            node("pointwise", (0, 3), root=4),
            node("input", root=5, tangent=True),
            node("pointwise", (5, 0, 3), root=6, backward=True),
        ],
        [4],
        [6],
        "loss_head",
    )


def over_tokens(permute: str) -> JointGraph:
    """Y = mm(norm(table[ids] + view(mm(ids)))); torch saves embeddings and norm. The view may transpose."""
    return JointGraph(
        [
            node("input", size=FEW, root=0),
            node("pointwise", (0,), root=1, target="aten.embedding", module="ids"),
            node("extern", (0,), root=2, target="aten.mm", module="mix"),
            node("view", (2,), root=2, target=permute),
            node("pointwise", (1, 3), root=4, target="aten.add", module="sum"),
            node("reduction", (4,), FEW, root=5, module="norm"),
            node("pointwise", (4, 5), root=6, module="norm"),
            node("extern", (6,), root=7, target="aten.mm", module="out"),
            node("input", root=8, tangent=True),
            node("extern", (8, 6), root=9, backward=True, target="aten.mm"),
            node("extern", (9, 1), root=10, backward=True, target="aten.mm"),
        ],
        [7],
        [10],
        "tokens",
    )
