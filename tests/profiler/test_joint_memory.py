"""Bytes of compiled code, computed from hand-written joint graphs as inductor's kernels would take them."""

from joint_graphs import FEW, MANY, node
from lowtide._torch.joint_graph import JointGraph
from lowtide.profiler.joint_memory import backward_half, forward_half, scratch_of
from lowtide.runtime.joint_slots import Recomputed


def scaled() -> JointGraph:
    """Y = mm(2 * gelu(mm(x))), with one small product at the end."""
    return JointGraph(
        [
            node("input", root=0),
            node("extern", (0,), root=1, target="aten.mm"),
            node("pointwise", (1,), root=2),
            node("pointwise", (2,), root=3),
            node("extern", (3,), FEW, root=4, target="aten.mm"),
        ],
        [4],
        [],
        "key",
    )


def test_a_kernel_writes_over_the_input_that_nothing_else_reads() -> None:
    half = forward_half(scaled(), Recomputed(frozenset(), frozenset()))
    assert half.levels == (MANY, MANY, MANY, MANY + FEW, FEW)


def test_a_kernel_with_two_outputs_has_both_in_memory_with_its_input() -> None:
    half = forward_half(scaled(), Recomputed(frozenset({2}), frozenset()))
    assert max(half.levels) == 3 * MANY
    assert half.levels[-1] == MANY + FEW  # saved, and the output


def activated() -> JointGraph:
    """Y = mm(gelu(mm(x))); backward recomputes the activation, whose gradient reads what it reads."""
    return JointGraph(
        [
            node("input", root=0),
            node("extern", (0,), root=1, target="aten.mm"),
            node("pointwise", (1,), root=2),
            node("extern", (2,), FEW, root=3, target="aten.mm"),
            node("input", root=4, tangent=True),
            node("extern", (4, 2), FEW, root=5, target="aten.mm", backward=True),
            node("extern", (4,), root=6, target="aten.mm", backward=True),
            node("pointwise", (6, 1), root=7, backward=True),
            node("extern", (7,), FEW, root=8, target="aten.mm", backward=True),
        ],
        [3],
        [5, 8],
        "key",
    )


def test_a_recomputed_activation_is_in_the_kernel_of_its_gradient_and_read_after_it() -> None:
    half = backward_half(activated(), Recomputed(frozenset({1}), frozenset({2})))
    assert half.born[2] == half.born[7] - 1  # the gradient goes over one of the inputs
    assert half.born[5] > half.born[7] > half.born[6]
    assert max(half.levels) == 2 * MANY  # the activation, and a gradient over the other
    assert half.levels[-1] == 2 * FEW - 2 * MANY  # both inputs are gone


def test_products_of_16_bit_values_have_the_scratch_memory_that_they_were_measured_with() -> None:
    graph = scaled()
    graph.nodes[1].is_half = graph.nodes[4].is_half = True
    nothing = Recomputed(frozenset(), frozenset())
    scratch = scratch_of(graph, nothing, ([2 * FEW, 2 * MANY], []))
    assert scratch == {1: 2 * MANY, 4: 2 * FEW}
    assert forward_half(graph, nothing, scratch).levels[0] == 3 * MANY
    assert scratch_of(graph, nothing, ([FEW], [])) == {}  # something else
