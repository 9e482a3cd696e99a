"""Two tensors are the same if all their bits are; and a number tells contents apart that differ only in their order."""

from collections.abc import Callable

import pytest
import torch

from lowtide.state.bitwise import PIECE, _integers, _sum_weighted, content_hash, identical

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128),
]


def content(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return numbers > 0 if dtype is torch.bool else (numbers * 100).to(dtype)


Number = Callable[[torch.Tensor], int]

ON_EACH_DEVICE = pytest.mark.parametrize(
    "content_hash", [content_hash, lambda tensor: _sum_weighted(_integers(tensor))]
)
"""As on a CPU, and as on a GPU."""


@ON_EACH_DEVICE
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_tells_orders_apart(content_hash: Number, dtype: torch.dtype) -> None:
    tensor = content(dtype, 64, 48)
    changed = tensor.clone()
    changed[0, 0], changed[40, 7] = tensor[tensor != tensor[0, 0]][0], tensor[0, 0]
    assert content_hash(tensor) == content_hash(tensor.clone()) == content_hash(tensor.t().contiguous().t())
    assert content_hash(tensor) == content_hash(torch.cat([tensor[0, :1], tensor.view(-1)])[1:].view(64, 48))
    expanded = tensor[:1, :1].expand(64, 48)
    assert content_hash(expanded) == content_hash(expanded.contiguous())
    others = [tensor.roll(2, 0), tensor.roll(8, 1), changed, tensor.reshape(-1).roll(1).view(64, 48)]
    numbers = [content_hash(other) for other in (tensor, *others)]
    assert len({*numbers}) == len(numbers)


def test_memory_that_was_read_can_be_resized_and_its_end_is_seen() -> None:
    # a forward hook may keep an activation until the next step, whose recording has to notice its end
    tensor = content(torch.float32, 64, 48)
    content_hash(tensor.t())
    assert tensor.untyped_storage().resizable()


@ON_EACH_DEVICE
@pytest.mark.parametrize("shape", [(3 * PIECE + 5,), (2, PIECE + 1), (5, 1, PIECE // 2)])
def test_so_it_does_across_pieces(content_hash: Number, shape: tuple[int, ...]) -> None:
    tensor = content(torch.float32, *shape)
    flat = tensor.view(-1)
    swapped = torch.cat([flat[-PIECE:], flat[PIECE:-PIECE], flat[:PIECE]]).view(shape)
    assert content_hash(tensor) == content_hash(tensor.clone())
    assert len({content_hash(tensor), content_hash(swapped), content_hash(flat.flip(0).view(shape))}) == 3


@ON_EACH_DEVICE
def test_powers_of_two_that_change_places_are_told_apart(content_hash: Number) -> None:
    ones = torch.ones(2**14)
    numbers = set()
    for place in range(0, 2**14, 512):
        other = ones.clone()
        other[place] = 2.0
        numbers.add(content_hash(other))
    assert len(numbers) == 32


@ON_EACH_DEVICE
@pytest.mark.parametrize(
    "tensor", [torch.empty(0), torch.tensor(1.5), torch.ones(3).expand(4, 3), torch.empty(3, 0, 2)]
)
def test_any_shape_has_a_number(content_hash: Number, tensor: torch.Tensor) -> None:
    assert content_hash(tensor) == content_hash(tensor.clone())


def test_nothing_large_is_copied() -> None:
    from lowtide import measure

    for tensor in (torch.randn(2**22), torch.randn(2048, 2048).t(), torch.randn(4, 64, 128, 128).permute(0, 2, 3, 1)):
        with measure() as memory:
            _sum_weighted(_integers(tensor))
        assert memory.peak_bytes <= 32 * PIECE


def test_on_a_cpu_no_memory_of_torch_is_taken() -> None:
    from lowtide import measure

    for tensor in (torch.randn(2**22), torch.randn(2048, 2048).t(), torch.randn(4, 64, 128, 128).permute(0, 2, 3, 1)):
        with measure() as memory:
            content_hash(tensor)
        assert memory.peak_bytes == 0


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_signed_zeros_of_complex_numbers_are_bits_too(dtype: torch.dtype) -> None:
    one, other = torch.complex(torch.zeros(2), torch.zeros(2)).to(dtype), torch.complex(-torch.zeros(2), torch.zeros(2))
    assert torch.equal(one, other.to(dtype))
    assert not identical(one, other.to(dtype))
    assert identical(one, one.clone())
    assert content_hash(one) != content_hash(other.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_signed_zeros_and_nans_are_bits(dtype: torch.dtype) -> None:
    zero, nan = torch.zeros(2, dtype=dtype), torch.full((2,), torch.nan, dtype=dtype)
    assert not identical(zero, -zero)
    assert identical(nan, nan.clone())
