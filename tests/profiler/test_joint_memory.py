"""Bytes of compiled code, computed from hand-written joint graphs as inductor's kernels would take them."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from joint_graphs import FEW, MANY, node
from lowtide._torch.joint_graph import JointGraph, _make_resize
from lowtide.memory.events import Allocate, Event, Free, Mark
from lowtide.profiler.joint_memory import (
    PRODUCT,
    compute_backward_half,
    compute_forward_half,
    read_scratch_bytes,
    unmodelled,
)
from lowtide.runtime.joint_slots import Recomputed

NOTHING = Recomputed(frozenset(), frozenset())


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
    half = compute_forward_half(scaled(), Recomputed(frozenset(), frozenset()))
    assert half.levels == (MANY, MANY, MANY, MANY + FEW, FEW)


def test_a_kernel_with_two_outputs_writes_one_over_the_input_that_nothing_else_reads() -> None:
    half = compute_forward_half(scaled(), Recomputed(frozenset({2}), frozenset()))
    assert half.levels[:3] == (MANY, 2 * MANY, 2 * MANY)
    assert half.levels[-1] == MANY + FEW  # saved, and the output


def test_kernels_that_no_extern_kernel_separates_have_their_values_in_memory_together() -> None:
    """A CPU calls them as one: the first kernel's input is there until the second one is done. A GPU does not."""
    graph = JointGraph(
        [
            node("input", root=0),
            node("extern", (0,), root=1, target="aten.mm"),
            node("reduction", (1,), FEW, root=2),
            node("extern", (0,), root=3, target="aten.mm"),
            node("pointwise", (1, 2), root=4),
            node("pointwise", (3,), 2 * MANY, root=5),
            node("extern", (4, 5), FEW, root=6),
        ],
        [6],
        [],
        "key",
    )
    half = compute_forward_half(graph, Recomputed(frozenset(), frozenset()))
    assert max(half.levels) == 4 * MANY + FEW  # both products, the first of them overwritten, and a larger result
    graph.is_on_cpu = False
    half = compute_forward_half(graph, Recomputed(frozenset(), frozenset()))
    assert max(half.levels) == 4 * MANY  # the first kernel has freed what it read


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


def test_a_recomputed_activation_is_freed_before_its_gradient_is_computed() -> None:
    half = compute_backward_half(activated(), Recomputed(frozenset({1}), frozenset({2})))
    assert half.allocated_at[2] < half.allocated_at[5] < half.allocated_at[7]
    assert half.levels[-1] == 2 * FEW - 2 * MANY  # both inputs are gone
    assert max(half.levels) == MANY + FEW


def test_fused_arithmetic_waits_for_the_call_that_needs_its_result() -> None:
    """Its input, the gradient, waits with it, beside the result of the call before."""
    graph = JointGraph(
        [
            node("input", root=0),
            node("input", root=1, tangent=True),
            node("pointwise", (1,), root=2, backward=True),
            node("extern", (0,), root=3, backward=True),
            node("extern", (2, 3), FEW, root=4, backward=True),
        ],
        [],
        [4],
        "key",
    )
    half = compute_backward_half(graph, Recomputed(frozenset(), frozenset()))
    assert half.levels == (MANY, 2 * MANY, MANY + FEW, FEW - MANY)
    assert half.allocated_at[3] < half.allocated_at[2]


def convolved() -> JointGraph:
    """Backward of y = conv(x): one call that returns the gradients of input and weight, of the input's size each."""
    return JointGraph(
        [
            node("input", root=0),
            node("input", root=1, tangent=True),
            node("pointwise", (1,), root=2, backward=True),
            node("extern", (2, 0), 0, root=3, target="aten.convolution_backward", backward=True),
            node("extern", (3,), root=4, target="getitem", backward=True),
            node("extern", (3,), root=5, target="getitem", backward=True),
        ],
        [],
        [4, 5],
        "key",
    )


def test_all_results_of_a_call_are_in_memory_together_with_its_arguments() -> None:
    half = compute_backward_half(convolved(), Recomputed(frozenset(), frozenset()))
    assert half.levels == (MANY, 2 * MANY, MANY, MANY, MANY)  # the gradient of the output is gone


def transient(block: int, n_bytes: int, op: str) -> tuple[Allocate, Free]:
    return Allocate(block, n_bytes, 4096 * block, op), Free(block, n_bytes)


def product(operands: tuple[int, int], *inside: Event) -> tuple[Event, ...]:
    return Mark(PRODUCT, operands), *inside, Mark(PRODUCT, ())


def test_products_of_16_bit_values_have_the_scratch_memory_that_they_were_measured_with() -> None:
    """Inductor ran the second product first. Attention takes scratch memory as well, in many small blocks."""
    graph = JointGraph(
        [
            node("input", root=0),
            node("input", size=FEW, root=1),
            node("extern", (0, 1), root=2, target="aten.mm", half=True),
            node("extern", (1, 0), root=3, target="aten.mm", half=True),
        ],
        [2, 3],
        [],
        "key",
    )
    attends = transient(1, FEW, "aten::_scaled_dot_product_flash_attention_for_cpu")
    second = product((FEW, MANY), *transient(2, 3 * MANY, "aten::mm"))
    first = product((MANY, FEW), *transient(3, MANY, "aten::mm"))
    scratch = read_scratch_bytes(graph, NOTHING, ((*second, *attends, *attends, *first), ()))
    assert scratch == {2: MANY, 3: 3 * MANY}
    assert compute_forward_half(graph, NOTHING, scratch).levels == (2 * MANY, 5 * MANY, 2 * MANY)
    assert read_scratch_bytes(graph, NOTHING, (second, ())) == {3: 3 * MANY}
    assert read_scratch_bytes(graph, NOTHING, (product((FEW, MANY)), ())) == {3: 0}


def added_up(*, half: bool) -> JointGraph:
    """Gradients of a residual stream, to which each of two layers adds a product of its own."""
    products = [node("extern", (1,), root=at, target="aten.mm", backward=True) for at in range(2, 6)]
    return JointGraph(
        [
            node("input", root=0),
            node("input", root=1, tangent=True),
            *products,
            node("pointwise", (0, 2, 3, 4, 5), root=6, backward=True),
            node("pointwise", (6,), MANY // 2, root=7, backward=True, half=half),
            node("extern", (7,), root=8, target="aten.mm", backward=True),
            node("pointwise", (6, 8), MANY // 2, root=9, backward=True, half=half),
            node("extern", (9,), root=10, target="aten.mm", backward=True),
        ],
        [],
        [10],
        "key",
    )


@pytest.mark.parametrize(("half", "n_bytes"), [(True, 2 * MANY + MANY // 2), (False, 5 * MANY + MANY // 2)])
def test_what_many_values_are_added_up_to_is_written_before_a_second_kernel_reads_it(half: bool, n_bytes: int) -> None:
    """With 16-bit values, products read the rounded sum. Without, a product would read the sum itself."""
    levels = dict(zip((*range(2, 11), -1), compute_backward_half(added_up(half=half), NOTHING).levels, strict=True))
    assert levels[8] == n_bytes - MANY  # the gradient of the output is gone


def test_a_sum_that_one_kernel_alone_reads_is_not_written() -> None:
    graph = added_up(half=True)
    graph.nodes[8].kind = "pointwise"  # no product is between the calls that read the sum
    assert 6 not in compute_backward_half(graph, NOTHING).allocated_at


def test_a_gradient_of_other_precision_takes_the_place_of_its_product_at_once() -> None:
    graph = JointGraph(
        [
            node("input", root=0),
            node("input", root=1, tangent=True),
            node("extern", (1, 0), root=2, target="aten.mm", backward=True, half=True),
            node("pointwise", (2,), 2 * MANY, root=3, target="prims.convert_element_type", backward=True),
            node("extern", (1, 0), root=4, target="aten.mm", backward=True, half=True),
        ],
        [],
        [3, 4],
        "key",
    )
    half = compute_backward_half(graph, NOTHING)
    assert half.order == (2, 3, 4)
    assert half.levels == (MANY, 3 * MANY, 3 * MANY, 2 * MANY)


def test_recorded_memory_that_no_value_accounts_for_is_counted_where_it_was_recorded() -> None:
    """A copy after the first product, freed before the second, which has scratch memory."""
    half = compute_forward_half(scaled(), Recomputed(frozenset({1}), frozenset()))
    recorded = (
        Allocate(1, MANY, 4096, "mm"),
        Allocate(2, 3 * MANY, 8192, "copy"),
        Free(2, 3 * MANY),
        Allocate(3, MANY, 12288, "gelu"),
        Allocate(4, 5 * MANY, 16384, "scratch"),
        Free(4, 5 * MANY),
        Free(3, MANY),
    )
    assert unmodelled(scaled(), half, recorded) == {1: 3 * MANY, 2: 0, 3: 5 * MANY, 4: 0, -1: 0}


def test_bytes_are_computed_at_the_symbolic_sizes_that_a_step_had() -> None:
    def sums(rows: int, width: int, x: Tensor) -> Tensor:  # one for each row: a symbol alone is a number of elements
        return x.sum(1)

    traced = make_fx(sums, tracing_mode="symbolic")(5, 64, torch.ones(5, 64))
    nodes = [node("input", size=0, root=at) for at in range(2)]
    nodes += [node("input", size=4 * 5 * 64, root=2), node("reduction", (2,), 4 * 5, root=3)]
    graph = JointGraph(nodes, [3], [], "key", resize=_make_resize(traced))
    assert [each.bytes for each in graph.at((9, 32)).nodes] == [0, 0, 4 * 9 * 32, 4 * 9]
