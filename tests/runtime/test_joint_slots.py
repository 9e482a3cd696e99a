"""Values of a joint graph on which a plan decides, and values that backward computes again."""

import pytest

from joint_graphs import MANY, block, classified, embedded, loss_head, masked, node, normalised, over_tokens, residual
from lowtide._torch.joint_graph import JointGraph
from lowtide.profiler.joint_memory import compute_backward_half, compute_forward_half
from lowtide.runtime.joint_slots import JointSlots

PLAIN = frozenset({3, 5})


def test_the_slot_of_a_normalised_tensor_is_what_it_was_computed_from() -> None:
    slots = JointSlots(masked(), PLAIN)
    assert {slot.address: slot.node for slot in slots.slots} == {
        "input#0:0": 0,
        "fc#0:0": 1,
        "#0:0": 2,
        "drop#0:0": 3,
        "norm#0:0": 4,
    }
    assert {slot.node for slot in slots.slots if slot.is_kept} == {0, 2, 4}


@pytest.mark.parametrize(("half", "address"), [(False, "sum#0:0"), (True, "norm#0:1")])
def test_with_16_bit_values_only_what_forward_writes_is_a_slot(half: bool, address: str) -> None:
    slots = JointSlots(normalised(half=half), frozenset({4, 5}))
    assert [slot.address for slot in slots.slots if not slot.is_kept] == [address]


@pytest.mark.parametrize("half", [False, True])
def test_16_bit_products_can_be_saved_in_place_of_a_larger_value_that_is_computed_from_them(half: bool) -> None:
    """As under the normalised sum, which has 32 bits. Products of 32 bits may be smaller too, as keys are."""
    joint = normalised(half=False)
    for product in joint.nodes[1:3]:
        product.bytes, product.is_half = MANY // 2, half
    slots = JointSlots(joint, frozenset({4, 5}))
    assert {"fc#0:0", "skip#0:0"}.issubset(slot.address for slot in slots.slots) == half
    assert slots.without(()).given == ({5} if half else {3, 4})
    assert slots.without({"norm#0:1"}).given == ({1, 2, 4} if half else {3, 4})
    assert slots.without({"norm#0:1", "fc#0:0"}).given == ({0, 2, 4} if half else {3, 4})


@pytest.mark.parametrize("half", [False, True])
def test_a_mask_and_32_bit_embeddings_can_be_computed_again_beside_16_bit_values_too(half: bool) -> None:
    assert JointSlots(masked(half=half), PLAIN).without({"drop#0:0"}).again >= {3}
    slots = JointSlots(embedded(half=half), frozenset({0, 1, 4}))
    assert 1 in slots.without({slot.address for slot in slots.slots}).again


@pytest.mark.parametrize(("target", "given"), [("aten.mm", set()), ("aten.convolution", {3})])
def test_what_is_computed_from_an_output_of_convolutions_is_always_saved(target: str, given: set[int]) -> None:
    slots = JointSlots(residual(target), frozenset({3}))
    assert slots.without({slot.address for slot in slots.slots}).given & {3} == given


@pytest.mark.parametrize(("half", "given"), [(False, set()), (True, {3})])
def test_with_16_bit_values_what_forward_does_not_read_is_always_saved(half: bool, given: set[int]) -> None:
    """Without the mask, another kernel would compute what it is a mask of."""
    joint = residual("aten.mm")
    joint.nodes[1].is_half, joint.nodes[3].is_forward = half, False
    slots = JointSlots(joint, frozenset({3}))
    assert slots.without({slot.address for slot in slots.slots}).given & {3} == given


@pytest.mark.parametrize(("target", "given"), [("aten.mm", set()), ("aten.convolution", {1})])
def test_what_a_convolution_reads_is_not_computed_again_from_inputs(target: str, given: set[int]) -> None:
    joint = JointGraph(
        [
            node("input", size=2 * MANY, root=0),
            node("pointwise", (0,), root=1, target="prims.convert_element_type", half=True),
            node("extern", (1,), root=2, target=target, half=True),
            node("input", root=3, tangent=True),
            node("extern", (3, 1), root=4, target="aten.mm", backward=True),
        ],
        [2],
        [4],
        "cast",
    )
    slots = JointSlots(joint, frozenset({1}))
    assert slots.without({slot.address for slot in slots.slots}).given & {1} == given


@pytest.mark.parametrize(("view", "addresses"), [("aten.view", {"ids#0:0", "sum#0:0"}), ("aten.permute", {"norm#0:1"})])
def test_sums_over_transposed_values_read_what_they_read_without_a_plan(view: str, addresses: set[str]) -> None:
    slots = JointSlots(over_tokens(view), frozenset({1, 5, 6}))
    assert {slot.address for slot in slots.slots if not slot.is_kept} == addresses


def test_a_tensor_that_is_computed_from_a_block_s_input_is_computed_again_from_it() -> None:
    slots = JointSlots(block(), frozenset({1, 2}))
    assert {slot.address: slot.is_kept for slot in slots.slots} == {"input#0:0": True, "norm#0:0": True}
    assert slots.without(()).given == {0, 1}
    held = JointSlots(block(), frozenset({0, 1}))  # torch holds the input itself
    assert [slot.address for slot in held.slots] == ["norm#0:0"]


@pytest.mark.parametrize(("plain", "given"), [({1}, {1}), ({1, 3}, {1, 3}), ({1, 4}, {1, 4})])
def test_a_reduction_that_torch_computes_again_is_not_saved(plain: set[int], given: set[int]) -> None:
    """Its readers would be other loops then, vectorised or not, and logarithms round otherwise in such."""
    slots = JointSlots(classified(), frozenset(plain))
    assert slots.without(()).given == given


@pytest.mark.parametrize(("size", "nodes"), [(MANY // 64, {0, 1, 3, 4}), (MANY // 64 + 1, {0, 1, 4})])
def test_a_reduction_that_torch_does_not_save_is_a_slot_if_it_is_small(size: int, nodes: set[int]) -> None:
    slots = JointSlots(classified(size=size), frozenset({1, 4}))
    assert {slot.node for slot in slots.slots} == nodes


def test_a_logarithm_of_sums_is_saved_in_a_graph_without_large_values_of_its_own() -> None:
    joint = loss_head()
    slots = JointSlots(joint, frozenset({0, 3}))
    assert slots.without({slot.address for slot in slots.slots}).given == {0, 3}
    assert JointSlots(joint, frozenset({3})).without(()).given == {0, 3}


def test_addresses_begin_with_the_hash_of_a_graph_whose_paths_another_graph_has() -> None:
    plain = JointSlots(masked(), PLAIN)
    assert [slot.address for slot in plain.named().slots] == [f"key/{slot.address}" for slot in plain.slots]
    assert plain.named().without({"key/drop#0:0"}) == plain.without({"drop#0:0"})


def test_torch_s_own_partition_is_torch_s_own() -> None:
    found = JointSlots(masked(), PLAIN).as_torch()
    assert (found.given, found.again) == (PLAIN, frozenset())


def test_a_mask_is_computed_again_from_the_seeds_that_are_saved() -> None:
    found = JointSlots(masked(), PLAIN).without({"drop#0:0"})
    assert found.given == {1, 2, 4}
    assert found.again == {3, 5}


def test_random_numbers_are_never_drawn_again() -> None:
    slots = JointSlots(masked(), PLAIN)
    found = slots.without({slot.address for slot in slots.slots})
    assert 2 in found.given
    assert 2 not in found.again


def test_saved_values_live_from_the_end_of_forward_to_their_last_read() -> None:
    joint = masked()
    slots = JointSlots(joint, PLAIN)
    plain = slots.as_torch()
    forward, backward = compute_forward_half(joint, plain), compute_backward_half(joint, plain)
    saved_bytes = MANY + MANY // 4
    assert forward.levels[-1] == saved_bytes + MANY  # and the output
    assert backward.levels[-1] == MANY - saved_bytes - MANY  # the gradient came, what was saved and the tangent went
    assert backward.first[3] == 0
    assert backward.last[5] == 1
