"""Indices of max pooling are kept in as few bytes as they need, and restored bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.planner import predict
from lowtide.planner.address_nodes import INDICES
from lowtide.planner.records import Decisions
from lowtide.runtime.partial_saves import packed
from lowtide.runtime.recipes import CannotRecompute
from lowtide.runtime.small_integers import pack_indices

STEM = (4, 8, 56, 56)
"""The result of a ResNet's stem, whose pooling has windows of 3 x 3 in planes of 112 x 112."""


def indices(shape: tuple[int, ...], **options: int) -> Tensor:
    return F.max_pool2d(torch.randn(shape), 3, **options, return_indices=True)[1]


def held_bytes(tensor: Tensor) -> int:
    bits = pack_indices(tensor)["bits"]
    assert isinstance(bits, Tensor)
    return bits.untyped_storage().nbytes()


def test_a_resnets_stem_keeps_one_byte_for_each_index_and_four_for_each_point() -> None:
    found = indices((4, 8, 112, 112), stride=2, padding=1)
    assert found.shape == STEM
    assert held_bytes(found) == found.numel() + 4 * 56 * 56
    assert torch.equal(packed(INDICES, found).get(), found)


def test_packing_allocates_the_packed_bytes_alone_on_a_cpu() -> None:
    found = indices((4, 8, 112, 112), stride=2, padding=1)
    with lowtide.measure() as memory:
        offsets = pack_indices(found)
    assert memory.peak_bytes == offsets["bits"].nbytes


def test_wider_planes_take_two_bytes() -> None:
    found = indices((8, 8, 40, 400), stride=2, padding=1)
    assert held_bytes(found) == 2 * found.numel() + 4 * found[0, 0].numel()
    assert torch.equal(packed(INDICES, found).get(), found)


@settings(max_examples=30)
@given(
    st.sampled_from([(3, 16, 30, 31), (16, 30, 31), (8, 6, 12, 13), (2, 4, 8, 9, 10)]), st.booleans(), st.integers(1, 3)
)
def test_indices_come_back_with_their_bits_and_strides(shape: tuple[int, ...], last: bool, stride: int) -> None:
    x = torch.randn(shape)
    if last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    pool = F.max_pool3d if len(shape) == 5 else F.max_pool2d
    found = pool(x, 3, stride, 1, return_indices=True)[1]
    try:
        again = packed(INDICES, found).get()
    except CannotRecompute:
        assert found.nbytes < 4096 or 2 * 4 * found.numel() > found.numel() * 4
        return
    assert torch.equal(again, found)
    assert again.stride() == found.stride()
    assert again.dtype is torch.int64


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((4, 4, 8, 8), -1),
        torch.tensor([0, 2**40]).repeat(512).view(2, 2, 2, 128).transpose(0, 3).contiguous(),
        torch.zeros(4, 8, 8, 8, dtype=torch.int32),
        torch.zeros(64, 64, dtype=torch.int64),
        torch.zeros(2, 2, 8, 8, dtype=torch.int64),
        torch.zeros(8, 8, 8, 8, dtype=torch.int64)[:4],
    ],
    ids=["negative", "far apart", "not 64 bits", "no planes", "small", "part of a storage"],
)
def test_other_tensors_are_kept(tensor: Tensor) -> None:
    with pytest.raises(CannotRecompute):
        pack_indices(tensor)


def test_a_step_keeps_its_indices_small_with_the_same_bits_and_the_predicted_peak() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 4, 3))
    batch = torch.randn(8, 3, 24, 24)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    profile = lowtide.rehearse(model, step, batch)
    slot = next(s for s in profile.slots if s.address.startswith("2#0") and profile.values[s.value].node == INDICES)
    value = profile.values[slot.value]
    assert value.bytes == 8 * 8 * 16 * 12 * 12
    (held,) = value.operands
    assert profile.values[held].bytes == 8 * 16 * 12 * 12 + 4 * 12 * 12
    decisions = Decisions(recompute=frozenset({slot.address}))
    predicted, plain = predict(profile, decisions), predict(profile, Decisions())
    assert plain.held_bytes - predicted.held_bytes == value.bytes - profile.values[held].bytes
    made = replace(lowtide.plan(profile, "100%"), recompute={slot.address: INDICES}, predicted=predicted)
    verdict = lowtide.verify(model, step, batch, made)
    assert not verdict.drifted
    assert verdict.identical
    assert verdict.within_budget
    assert verdict.measured_peak_bytes == verdict.predicted_peak_bytes
