"""Memory that CUDA's kernels allocate internally, to the byte, as their sources state it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
from lowtide.memory.events import Allocate, Free

HALF, SINGLE = torch.bfloat16, torch.float32


class Attention(nn.Module):
    """Attention of a weight with itself, or of many heads with few; rows lie before heads, as linear layers have it."""

    rows_first = True

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], keys: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.query = nn.Parameter(self._swap(torch.randn(shape, dtype=dtype)).contiguous())
        self.key = nn.Parameter(self._swap(torch.randn(keys or shape, dtype=dtype)).contiguous())

    def forward(self, mask: Tensor | None) -> Tensor:
        query, key = self._swap(self.query), self._swap(self.key)
        out = F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2).flatten(2)

    def _swap(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if self.rows_first else tensor


def estimated(model: nn.Module, batch: object, gpu: str, step: Callable[[Any], Any] | None = None) -> GpuMemoryEstimate:
    return lowtide.estimate(model, step or (lambda x: _weighted(model(x)).backward()), batch, device=gpu)


def _weighted(out: Tensor) -> Tensor:
    return (out * out).sum()  # whose gradient is contiguous


def blocks(found: GpuMemoryEstimate, op: str) -> list[int]:
    """Sizes of all that an operator allocates in the second step, in its order."""
    events = [event for event in found.whole if type(event) is Allocate and event.op == op]
    return [event.bytes for event in events[len(events) // 2 :]]


EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
FLASH = "aten::_scaled_dot_product_flash_attention"


def masked(dtype: torch.dtype, shape: tuple[int, ...], gpu: str) -> GpuMemoryEstimate:
    mask = torch.zeros(shape[0], shape[1], shape[2], shape[2], dtype=dtype)
    return estimated(Attention(dtype, shape), mask, gpu)


def test_efficient_attention_in_single_precision() -> None:
    """Delta is made of a product, its sums and their copy; queries' gradients have a tile and a lock of 16 bytes."""
    found = masked(SINGLE, (2, 4, 250, 64), "A100-40")
    result, rows = 2 * 4 * 250 * 64 * 4, 2 * 4 * 250 * 4
    assert blocks(found, EFFICIENT) == [result, 2 * 4 * 256 * 4]  # one number a row, rows to 32; no seed
    tiles = 2 * 4 * 4 * (64 * 64 * 4 + 16)
    assert blocks(found, EFFICIENT + "_backward") == [result] * 3 + [result, rows, rows, tiles]


def test_the_product_is_freed_before_the_workspace_is_allocated() -> None:
    events = [e for e in masked(SINGLE, (2, 4, 256, 64), "A100-40").whole if not hasattr(e, "name")]
    workspace = next(i for i, e in enumerate(events) if type(e) is Allocate and e.bytes == 8 * 4 * (64 * 64 * 4 + 16))
    before = events[workspace - 5 : workspace]
    assert [type(event) for event in before] == [Allocate, Allocate, Allocate, Free, Free]
    assert [event.block for event in before[3:]] == [event.block for event in before[:2]]


@pytest.mark.parametrize(
    ("dtype", "head", "gpu", "sizes"),
    [
        (HALF, 64, "A100-40", {8 * 4 * (64 * 64 * 4 + 16)}),
        (
            torch.float16,
            128,
            "T4",
            {8 * 2 * 2 * (128 * 64 * 4 + 16), 8 * (4 * (64 * 64 * 8 + 16) + 2 * 4 * 64 * 128 * 4)},
        ),
        (HALF, 96, "RTX 3090", {8 * 2 * 2 * (128 * 64 * 4 + 16)}),
        (HALF, 256, "A100-40", {8 * (2 * 4 * (128 * 64 * 4 + 16) + 2 * 4 * 64 * 256 * 4)}),
    ],
)
def test_efficient_attention_in_half_precision(dtype: torch.dtype, head: int, gpu: str, sizes: set[int]) -> None:
    """Delta is one number a row; keys and values have staging areas, a part each, unless they stay in registers."""
    found = masked(dtype, (2, 4, 256, head), gpu)
    *_, delta, workspace = blocks(found, EFFICIENT + "_backward")
    assert delta == 2 * 4 * 256 * 4
    assert workspace in sizes
    accumulated = [2 * 4 * 256 * head * 4] * (head > 128)  # the result in single precision
    assert blocks(found, EFFICIENT)[2:] == accumulated


def test_flash_attention_pads_rows_and_heads() -> None:
    found = estimated(Attention(HALF, (2, 4, 250, 72)), None, "A100-40")
    result = 2 * 4 * 250 * 72 * 2
    assert blocks(found, FLASH)[:2] == [result, 2 * 4 * 250 * 4]
    inside = [2 * 4 * 256 * 4, 2 * 4 * 256 * 96 * 4]  # rows to 128, heads to 32, in single precision
    assert blocks(found, FLASH + "_backward") == [*[result] * 3, *inside]


def test_flash_attention_copies_what_has_its_heads_first() -> None:
    model = Attention(HALF, (2, 4, 128, 64))
    model.rows_first = False
    model.query.data, model.key.data = (t.data.transpose(1, 2).contiguous() for t in (model.query, model.key))
    result = 2 * 4 * 128 * 64 * 2
    assert blocks(estimated(model, None, "A100-40"), FLASH + "_backward")[:5] == [
        *[result] * 4,
        4 * 2 * 128 * 4,
    ]  # the result


def test_shared_keys_get_a_gradient_for_each_head() -> None:
    found = estimated(Attention(HALF, (1, 8, 128, 64), (1, 2, 128, 64)), None, "A100-40")
    assert blocks(found, FLASH + "_backward")[-2:] == [8 * 128 * 64 * 2] * 2


def test_few_rows_split_many_keys() -> None:
    """64 rows and 4096 keys: 8 to 16 parts of 256, by how many multiprocessors there are."""
    found = estimated(Attention(HALF, (1, 1, 64, 64), (1, 1, 4096, 64)), None, "A100-40")
    assert blocks(found, FLASH)[-2:] == [16 * 64 * 4, 16 * 64 * 64 * 4]
    bounds = {(b.least, b.bytes, b.most) for b in found.bounds.values()}
    assert (8 * 64 * 64 * 4, 16 * 64 * 64 * 4, 16 * 64 * 64 * 4) in bounds


EMBEDDING = "aten::embedding_dense_backward"


@pytest.mark.parametrize(("n", "padding", "sorts"), [(3072, None, False), (3072, 0, False), (3073, None, True)])
def test_few_indices_are_not_sorted(n: int, padding: int | None, sorts: bool) -> None:
    model = nn.Embedding(5000, 16, padding_idx=padding)
    found = blocks(estimated(model, torch.zeros(n, dtype=torch.int64), "L4"), EMBEDDING)
    assert (len(found) > 1) == sorts
    assert found[0] == 5000 * 16 * 4


def test_many_indices_take_lists_and_a_row_for_each_partial_sum() -> None:
    n, table, width = 4000, 1000, 64
    found = blocks(estimated(nn.Embedding(table, width), torch.zeros(n, dtype=torch.int64), "L4"), EMBEDDING)
    each = 8 * n
    partial = n // 10 + table
    lists = [each, each, each, 2 * each, each, 8, each, 8 * table, 8 * table, 8, 8 * partial]
    assert found == [table * width * 4, *lists, partial * width * 4]


@pytest.mark.parametrize(("dtype", "more"), [(SINGLE, 0), (HALF, 2 * 64 * 4)])
def test_few_rows_are_added_up_in_one_pass(dtype: torch.dtype, more: int) -> None:
    model = nn.Embedding(2, 64, dtype=dtype)
    found = blocks(estimated(model, torch.zeros(4000, dtype=torch.int64), "L4"), EMBEDDING)
    assert found[-2:] == [8 * 402, 8 * 402 + more]


def test_indexing_sorts_what_it_adds_up() -> None:
    model = nn.Linear(64, 50)
    index = torch.zeros(100, dtype=torch.int64)
    found = estimated(model, index, "L4", lambda i: model.weight[i].sum().backward())
    values = 100 * 64 * 4  # the sum's gradient is one number, broadcast
    assert blocks(found, "aten::index_put")[-6:] == [800, values, 800, 800, 800, 1600]


@pytest.mark.parametrize("last", [False, True])
def test_convolutions_keep_the_layout_that_they_are_given(last: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    model = nn.Conv2d(4, 8, 3).to(memory_format=layout)
    x = torch.randn(2, 4, 8, 8).to(memory_format=layout).requires_grad_()

    def step(x: Tensor) -> None:
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert out.is_contiguous(memory_format=layout)
        assert gradient.is_contiguous(memory_format=layout)

    estimated(model, x, "L4", step)


def test_memory_that_only_cudnn_knows_is_noted_and_not_promised() -> None:
    recurrent = nn.LSTM(8, 8)
    found = estimated(recurrent, torch.randn(4, 2, 8), "L4", lambda x: recurrent(x)[0].sum().backward())
    assert found.verdict == "fits"  # as it was measured on one GPU
    assert not found.is_sure
    assert any("cuDNN's reserve" in line for line in found.unknown)
    normed = nn.BatchNorm2d(4)
    x = torch.randn(2, 4, 8, 8)
    for layout, known in ((torch.contiguous_format, True), (torch.channels_last, False)):
        found = estimated(normed, x.to(memory_format=layout), "L4")
        assert (found.verdict == "fits") == known


class Turned(nn.Module):
    """A layer that is given a weight whose dimensions are in another order than its memory."""

    def __init__(self, layer: Callable[..., Tensor], shape: tuple[int, ...], order: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.order = layer, order
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self) -> Tensor:
        return self.layer(self.weight.permute(self.order))


def turned(layer: Callable[..., Tensor], shape: tuple[int, ...], order: tuple[int, ...]) -> GpuMemoryEstimate:
    model = Turned(layer, shape, order)
    return estimated(model, None, "L4", lambda _: _weighted(model()).backward())


def test_layer_norm_copies_its_input_before_there_is_a_result() -> None:
    model = Turned(nn.LayerNorm(8), (2, 8, 16), (0, 2, 1))
    found = estimated(model, None, "L4", lambda _: _weighted(model()).backward())
    whole, row, width = 2 * 8 * 16 * 4, 2 * 16 * 4, 8 * 4
    assert blocks(found, "aten::native_layer_norm") == [whole, whole, row, row]
    assert blocks(found, "aten::native_layer_norm_backward") == [whole, whole, width, width]
    events = [e for e in found.whole if not hasattr(e, "name") and getattr(e, "op", "") == "aten::native_layer_norm"]
    copy, result = (event.block for event in events[:2])
    freed = [event.block for event in found.whole if type(event) is Free]
    assert copy in freed
    assert result not in freed[: freed.index(copy)]


def test_layer_norm_of_many_short_rows_sums_up_in_parts() -> None:
    rows, width = 2**16 + 1, 16
    found = estimated(nn.LayerNorm(width), torch.randn(rows, width), "L4")
    inside = blocks(found, "aten::native_layer_norm_backward")[-2:]
    assert inside == [-(-rows // 32) * width * 4] * 2
    assert {(b.least, b.most) for b in found.bounds.values() if b.bytes == inside[0]} == {(0, inside[0])}


def test_the_gradient_of_a_layer_norm_is_contiguous() -> None:
    model = nn.LayerNorm(8)

    def step(x: Tensor) -> None:
        out = model(x.transpose(1, 2))
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(x).transpose(1, 2))
        assert gradient.transpose(1, 2).is_contiguous()

    estimated(model, torch.randn(2, 8, 16, requires_grad=True), "L4", step)


def test_softmax_multiplies_the_gradient_with_its_result() -> None:
    whole = 2 * 8 * 16 * 4
    plain = turned(lambda x: x.softmax(-1), (2, 8, 16), (0, 1, 2))
    assert blocks(plain, "aten::_softmax") == [whole]
    assert blocks(plain, "aten::_softmax_backward_data") == [whole, whole]
    copied = turned(lambda x: x.softmax(-1), (2, 8, 16), (0, 2, 1))
    assert blocks(copied, "aten::_softmax") == [whole, whole]
    logs = turned(lambda x: x.log_softmax(-1), (2, 8, 16), (0, 2, 1))
    assert blocks(logs, "aten::_log_softmax") == [whole, whole]
    assert blocks(logs, "aten::_log_softmax_backward_data") == [whole]


def test_group_norm_keeps_two_numbers_a_channel_aside() -> None:
    found = estimated(nn.GroupNorm(2, 8), torch.randn(4, 8, 5, 5, requires_grad=True), "L4")
    whole, channel, group, weight = 4 * 8 * 25 * 4, 4 * 8 * 4, 4 * 2 * 4, 8 * 4
    assert blocks(found, "aten::native_group_norm") == [whole, group, group, channel, channel]
    inside = [channel, channel, group, group, channel]
    assert blocks(found, "aten::native_group_norm_backward") == [whole, weight, weight, *inside]


@pytest.mark.parametrize(
    ("layer", "op", "made"),
    [
        (lambda x: F.max_pool2d(x, 2), "aten::max_pool2d_with_indices", [128, 256, 512]),
        (lambda x: F.avg_pool2d(x, 2), "aten::avg_pool2d", [128, 512]),
        (lambda x: F.interpolate(x, scale_factor=2.0), "aten::upsample_nearest2d", [2048, 512]),
    ],
)
def test_pooling_and_upsampling_copy_what_has_no_layout(
    layer: Callable[[Tensor], Tensor], op: str, made: list[int]
) -> None:
    found = turned(layer, (2, 4, 4, 4), (1, 0, 3, 2))
    assert blocks(found, op) == made
    assert blocks(turned(layer, (2, 4, 4, 4), (0, 1, 2, 3)), op) == made[:-1]
    assert blocks(turned(layer, (2, 4, 4, 4), (0, 3, 1, 2)), op) == made[:-1]  # channels last


def test_a_gradient_in_another_layout_than_the_batch_is_copied_and_gets_its_layout() -> None:
    model = nn.BatchNorm2d(4)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)

    def step(x: Tensor) -> None:
        out = model(x)
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out, memory_format=torch.channels_last))
        assert gradient.is_contiguous()

    whole = 2 * 4 * 64 * 4
    assert blocks(estimated(model, x, "L4", step), "aten::native_batch_norm_backward")[:2] == [whole, whole]


def test_convolutions_copy_their_input_first() -> None:
    model = nn.Conv2d(4, 8, 3)
    x = torch.randn(2, 8, 8, 4, requires_grad=True)
    found = estimated(model, x, "L4", lambda x: _weighted(model(x.permute(0, 3, 2, 1))).backward())
    given, result = 2 * 4 * 64 * 4, 2 * 8 * 36 * 4
    assert blocks(found, "aten::convolution")[:2] == [given, result]
    assert blocks(found, "aten::convolution_backward")[:2] == [given, given]


@pytest.mark.parametrize(("repeated", "copied"), [(True, 2), (False, 0)])
def test_factors_of_repeated_numbers_are_copied(repeated: bool, copied: int) -> None:
    """The gradient of a sum is one number, for both products of a linear layer."""
    model = nn.Linear(8, 16, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    found = estimated(model, x, "L4", lambda x: (model(x).sum() if repeated else _weighted(model(x))).backward())
    assert blocks(found, "aten::mm").count(4 * 16 * 4) == 1 + copied


def test_the_mask_of_a_dropout_comes_first() -> None:
    found = turned(nn.Dropout(0.5), (4, 8), (0, 1))
    assert blocks(found, "aten::native_dropout") == [4 * 8, 4 * 8 * 4]


@pytest.mark.parametrize(
    ("affine", "dtype", "training", "copied"),
    [(True, SINGLE, True, True), (False, SINGLE, True, False), (True, HALF, True, False), (True, SINGLE, False, False)],
)
def test_batch_norms_that_cudnn_does_not_do_take_gradients_as_they_lie(
    affine: bool, dtype: torch.dtype, training: bool, copied: bool
) -> None:
    norm = nn.BatchNorm2d(4, dtype=dtype)
    x = torch.randn(2, 4, 8, 8, dtype=dtype, requires_grad=True)

    def step(x: Tensor) -> None:
        weights = (norm.weight, norm.bias) if affine else (None, None)
        out = F.batch_norm(x, norm.running_mean, norm.running_var, *weights, training)
        torch.autograd.grad(out, x, torch.ones_like(out, memory_format=torch.channels_last))

    found = blocks(estimated(norm, x, "L4", step), "aten::native_batch_norm_backward")
    assert found.count(x.numel() * x.element_size()) == 1 + copied


def test_a_batch_of_rows_and_its_gradient_are_normalized_as_they_lie() -> None:
    model, x = nn.BatchNorm1d(4), torch.randn(4, 8, requires_grad=True)

    def step(x: Tensor) -> None:
        (gradient,) = torch.autograd.grad(model(x.t()), x, torch.ones(8, 4))
        assert gradient.is_contiguous()

    assert blocks(estimated(model, x, "L4", step), "aten::native_batch_norm_backward").count(8 * 4 * 4) == 1


def test_attention_copies_a_gradient_that_has_its_heads_first_before_there_are_others() -> None:
    shape = (1, 2, 128, 64)
    model, weights = Attention(SINGLE, shape), torch.ones(shape)

    def step(mask: Tensor) -> None:
        query = model.query.transpose(1, 2)
        (F.scaled_dot_product_attention(query, query, query, mask) * weights).sum().backward()

    found = estimated(model, torch.zeros(1, 2, 128, 128), "L4", step)
    op, whole = f"{EFFICIENT}_backward", 2 * 128 * 64 * 4
    taken = [event.block for event in found.whole if isinstance(event, Allocate) and event.op == op]
    freed = [event.block for event in found.whole if isinstance(event, Free)]
    assert blocks(found, op)[:5] == [whole] * 5  # the copy, three gradients, the product
    assert freed.index(taken[4]) < freed.index(taken[0])
    assert all(freed.index(taken[0]) < freed.index(block) for block in taken[1:4] if block in freed)
