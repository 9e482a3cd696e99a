"""Scratch memory of single operators: rules and trials compared with the CPU's own allocator."""

from typing import Any

import pytest
import torch

import lowtide
from lowtide._torch.tensors import get_storage_id
from lowtide.estimator.cpu import scratch_trials as trials
from lowtide.estimator.cpu.scratch import Scratch
from lowtide.estimator.cpu.scratch_trials import Trials
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.memory_timeline import Timeline

aten = torch.ops.aten


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def attention(length: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return t(2, 3, length, 32, dtype=dtype), t(2, 3, keys, 32, dtype=dtype), t(2, 3, keys, 32, dtype=dtype)


FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
CONVOLVED = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "add": (aten.add.Tensor, (t(64, 64), t(64, 64, dtype=torch.bfloat16))),
    "mul of integers": (aten.mul.Tensor, (t(64, 64), t(64, 64, dtype=torch.int64))),
    "quotient of integers": (aten.div.Tensor, (t(64, 64, dtype=torch.int64), t(64, 64, dtype=torch.int64))),
    "sum in place": (aten.add_.Tensor, (t(64, 64), t(64, 64, dtype=torch.bfloat16))),
    "safe softmax": (aten._safe_softmax.default, (t(8, 4, 64, 64), -1)),
    "log softmax, strided": (aten._log_softmax.default, (t(64, 32, 16).transpose(1, 2), 1, False)),
    "layer norm, strided": (aten.native_layer_norm.default, (t(64, 32).t(), [64], None, None, 1e-5)),
    "roll": (aten.roll.default, (t(64, 32), [1, 1], [0, 1])),
    "roll of one dimension": (aten.roll.default, (t(64, 32).t(), [1], [0])),
    "cumulative sum": (aten.cumsum.default, (t(64, 64, dtype=torch.bool), 1)),
    "embedding": (aten.embedding.default, (t(50, 32), torch.zeros(1, 64, dtype=torch.int64).expand(8, 64))),
    "nearest": (aten.upsample_nearest2d.default, (t(2, 16, 16, 16), [32, 32])),
    "flash, short": (FLASH, attention(64, 64)),
    "flash, long": (FLASH, attention(800, 100)),
    "convolution": (aten.convolution.default, (t(4, 3, 32, 32), t(20, 3, 3, 3), *CONVOLVED)),
    "product": (aten.mm.default, (t(64, 48), t(80, 48).t())),
    "product with what was broadcast": (aten.mm.default, (t(64, 1).expand(64, 48), t(1).expand(48, 80))),
    "product with pieces": (aten.addmm.default, (t(80), t(64, 100)[:, :48], t(48, 160)[:, ::2])),
    "product with a column": (aten.mm.default, (t(1, 48).expand(64, 48), t(48, 1))),
    "products of a batch": (aten.bmm.default, (t(64, 48, 4).permute(2, 0, 1), t(4, 48, 80))),
    "sums of products": (aten.baddbmm.default, (t(4, 64, 80), t(4, 64, 48), t(4, 1, 80).expand(4, 48, 80))),
    "products of a batch, small": (aten.bmm.default, (t(8, 4, 4).permute(2, 0, 1), t(4, 4, 8))),
    "product with a vector": (aten.mv.default, (t(64, 1).expand(64, 48), t(48))),
    "product of integers": (
        aten.mm.default,
        (t(64, 1, dtype=torch.int64).expand(64, 48), t(48, 80, dtype=torch.int64)),
    ),
    "products of integers": (
        aten.bmm.default,
        (t(4, 64, 1, dtype=torch.int64).expand(4, 64, 48), t(4, 48, 80, dtype=torch.int64)),
    ),
    "bilinear": (aten._trilinear.default, (t(64, 32), t(3, 32, 32), t(64, 32), [1, 3], [0], [1, 2], [2, 3])),
    "exponential of a matrix": (aten.linalg_matrix_exp.default, (t(64, 64),)),
    "sort": (aten.sort.default, (t(4096),)),
    "columns of an image": (aten.im2col.default, (t(1, 3, 64, 64), [3, 3], [1, 1], [0, 0], [1, 1])),
    "bicubic": (aten.upsample_bicubic2d.default, (t(1, 3, 64, 64), [128, 128], False, 2.0, 2.0)),
    "roll of all": (aten.roll.default, (t(64, 1).expand(64, 64), [3])),
    "masked scatter": (aten.masked_scatter.default, (t(64, 64), t(64, 64, dtype=torch.bool), t(64, 64))),
    "bfloat16 product": (aten.mm.default, (t(256, 96, dtype=torch.bfloat16), t(96, 64, dtype=torch.bfloat16))),
}  # fmt: skip


def measured(func: Any, args: tuple[Any, ...]) -> tuple[int, list[int]]:
    """Bytes beyond the results at the peak, and those of the results."""
    before = {get_storage_id(a) for a in args if isinstance(a, torch.Tensor)}
    with CpuRecorder(watch=()) as recorder:
        out = func(*args)
    made = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)]
    new = [o.untyped_storage().nbytes() for o in made if get_storage_id(o) not in before]
    return Timeline(recorder.stream).peak_bytes - sum(new), new


@pytest.mark.parametrize("name", CALLS)
def test_extra_bytes_are_the_measured_ones(name: str) -> None:
    func, args = CALLS[name]
    extra, _ = measured(func, args)
    known = Trials()
    scratch = Scratch("cpu", known)
    out = func(*args)
    made = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor)]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    scratch.of(func, args, {}, tensors, made)
    known.learn()
    _, found = scratch.of(func, args, {}, tensors, made)
    assert sum(found) == pytest.approx(extra, abs=64)


def test_a_large_convolution_is_learned_from_some_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(20, 3, 3, 3)
    args = (torch.ones(40, 3, 32, 32), weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    extra, results = measured(aten.convolution.default, args)
    monkeypatch.setattr(trials, "_table", {})
    monkeypatch.setattr(trials, "LARGEST_TRIAL", 2**10)
    known = Trials()
    assert known.of(aten.convolution.default, args, {}) == ({}, [])
    known.learn()
    assert known.of(aten.convolution.default, args, {}) == ({0: results[0]}, [extra])


def test_operators_too_large_for_a_trial_are_listed_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_table", {})
    monkeypatch.setattr(trials, "LARGEST_TRIAL", 2**10)
    one = torch.ones(64, 64, dtype=torch.bfloat16)
    known = Trials()
    known.of(aten.mm.default, (one, one), {})
    known.learn()
    assert known.of(aten.mm.default, (one, one), {}) == ({}, [])
    assert known.unknown == {"aten.mm.default": 2 * 64 * 64 * 2}


def test_an_operator_of_others_is_listed_and_not_tried() -> None:
    calls = []

    @torch.library.custom_op("lowtide_tests::squared", mutates_args=())
    def squared(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x * x

    @squared.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    model = torch.nn.Linear(64, 64)

    def step(batch: torch.Tensor) -> None:
        (model(batch) + squared(batch)).sum().backward()
        model.zero_grad()

    estimated = lowtide.estimate(model, step, t(8, 64))
    assert estimated.unknown == ("lowtide_tests.squared.default: scratch memory, beside arguments of 2048 bytes",)
    assert calls == []


def test_a_trial_advances_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_table", {})
    generator = torch.Generator()
    before = torch.get_rng_state(), generator.get_state()
    known = Trials()
    for drawing in (None, generator):
        known.of(aten.multinomial.default, (t(8, 16), 4, False), {"generator": drawing})
    known.learn()
    assert len(trials._table) == 2
    assert all(trials._table.values())
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
