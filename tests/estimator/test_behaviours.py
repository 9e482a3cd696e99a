"""CUDA's behaviours, each against whole numbers that follow from its source."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from lowtide.estimator.cuda.ops.autocast import kernels
from lowtide.estimator.cuda.ops.op_table import BEHAVIOURS, CUDA_OPS, KERNELS
from lowtide.memory.events import Allocate

HEADS, LENGTH, HEAD = 4, 256, 64


class Attention(nn.Module):
    """Attention of a weight with itself, as bare as can be."""

    def __init__(self, dtype: torch.dtype, head: int = HEAD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, HEADS, LENGTH, head, dtype=dtype))

    def forward(self, mask=None, **options):
        return F.scaled_dot_product_attention(self.weight, self.weight, self.weight, mask, **options)


def operators(model: nn.Module, batch: object, device: str, **options: object) -> set[str]:
    estimated = lowtide.estimate(model, lambda mask: model(mask, **options).sum().backward(), batch, device=device)
    return {event.op for event in estimated.whole if type(event) is Allocate}


@pytest.mark.parametrize(
    ("dtype", "head", "masked", "gpu", "kernel"),
    [
        (torch.bfloat16, 64, False, "A100-40", "flash"),
        (torch.bfloat16, 64, False, "H100-80", "cudnn"),
        (torch.bfloat16, 64, False, "T4", "math"),
        (torch.float16, 64, False, "T4", "efficient"),
        (torch.float32, 64, False, "A100-40", "efficient"),
        (torch.float32, 64, False, "cuda:24GiB", "efficient"),
        (torch.bfloat16, 64, True, "A100-40", "efficient"),
        (torch.float32, 66, False, "A100-40", "math"),
        (torch.bfloat16, 256, False, "RTX 4090", "flash"),
        (torch.bfloat16, 200, False, "RTX 4090", "efficient"),
        (torch.float64, 64, False, "A100-40", "math"),
    ],
)
def test_the_kernel_of_attention(dtype: torch.dtype, head: int, masked: bool, gpu: str, kernel: str) -> None:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool) if masked else None
    found = operators(Attention(dtype, head), mask, gpu)
    fused = {name for name in found if "scaled_dot_product" in name and "backward" not in name}
    assert fused == (set() if kernel == "math" else {f"aten::_scaled_dot_product_{kernel}_attention"})


def test_a_switch_turns_a_kernel_off() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = operators(Attention(torch.bfloat16), None, "A100-40")
    assert not any("flash" in name for name in found)


def test_scores_are_never_held_but_by_the_math_kernel() -> None:
    scores = 2 * HEADS * LENGTH * LENGTH
    largest = {}
    for dtype in (torch.float32, torch.float64):
        model = Attention(dtype)
        estimated = lowtide.estimate(model, lambda _, m=model: m().sum().backward(), None, device="A100-40")
        tensors = [e for e in estimated.whole if type(e) is Allocate and e.op.startswith("aten::")]
        largest[dtype] = max(event.bytes // dtype.itemsize for event in tensors)
    assert largest[torch.float32] < scores == largest[torch.float64]


class Normed(nn.Module):
    """One layer after a leaf, so that nothing else is saved."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.leaf = layer, nn.Parameter(torch.randn(512, 128))

    def forward(self):
        return self.layer(self.leaf)


@pytest.mark.parametrize(
    ("layer", "saved"),
    [
        (nn.RMSNorm(128), 512 * 4),  # one number a row
        (nn.LayerNorm(128), 2 * 512 * 4),  # two
        (nn.Dropout(0.5), 512 * 128),  # a byte an element
        (nn.GELU(), 0),
    ],
)
def test_tensors_that_a_layer_saves_beside_its_result(layer: nn.Module, saved: int) -> None:
    model = Normed(layer)
    estimated = lowtide.estimate(model, lambda _: model().sum().backward(), None, device="A100-40")
    forward = next(phase for phase in estimated.timeline.phases if phase.name == "forward")
    assert forward.peak_bytes == 512 * 128 * 4 + saved + 4  # the result, what is saved, the sum


def test_two_workspaces_of_cublas_that_stay() -> None:
    model = nn.Linear(8, 8)
    for gpu, n_bytes in (("A100-40", 8_519_680), ("H100-80", 32 * 2**20)):
        estimated = lowtide.estimate(model, lambda x: model(x).sum().backward(), torch.ones(4, 8), device=gpu)
        found = [event for event in estimated.whole if type(event) is Allocate and event.op == "cublas::workspace"]
        assert [event.bytes for event in found] == [n_bytes] * 2
        freed = {event.block for event in estimated.whole if type(event) is not Allocate and hasattr(event, "bytes")}
        assert not freed & {event.block for event in found}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_casts_weights_once_and_keeps_them(device: str) -> None:
    """A weight used three times is cast once; its cast lives until autocast ends."""
    weight = nn.Linear(256, 256, bias=False)

    def step(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            for _ in range(3):
                x = weight(x)
            loss = F.mse_loss(x, torch.zeros_like(x))
        assert x.dtype is torch.bfloat16
        assert loss.dtype is torch.float32
        loss.backward()

    estimated = lowtide.estimate(weight, step, torch.randn(16, 256), device="A100-40")
    casts = [
        e for e in estimated.whole if type(e) is Allocate and e.op == "aten::_to_copy" and e.bytes == 256 * 256 * 2
    ]
    assert len(casts) == 2  # one a step
    assert any("autocast for the CPU" in line for line in estimated.assumed) == (device == "cpu")


def test_autocast_casts_what_a_script_has_on_the_cpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))

    def step(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.rand(2, 3, 8, 8))
        assert out.dtype is torch.bfloat16
        out.float().sum().backward()

    estimated = lowtide.estimate(model, step, torch.ones(1), device="A100-40")
    casts = [e.bytes for e in estimated.whole if type(e) is Allocate and e.op == "aten::_to_copy"]
    assert casts.count(2 * 3 * 64 * 4) == 2  # on the GPU, once a step
    assert casts.count(2 * 3 * 64 * 2) == 2  # and then in half of the bytes


def test_a_convolution_has_bounds_and_a_depthwise_one_needs_nothing() -> None:
    x = torch.randn(2, 16, 8, 8)
    for groups, expected in ((1, True), (16, False)):
        model = nn.Conv2d(16, 16, 3, padding=1, groups=groups)
        estimated = lowtide.estimate(model, lambda x, m=model: m(x).sum().backward(), x, device="RTX 3060")
        assert any(line.startswith("aten::convolution") for line in estimated.unknown) == expected
        low, high = estimated.interval
        assert low <= estimated.peak_reserved_bytes <= high


def test_unknown_memory_that_matters_makes_the_answer_unknown() -> None:
    """On a GPU that is between the bounds the answer is neither yes nor no."""
    model = nn.Conv2d(64, 64, 3, padding=1)
    x = torch.randn(64, 64, 64, 64)

    def verdict(device):
        return lowtide.estimate(model, lambda x: model(x).sum().backward(), x, device=device)

    low, high = verdict("cuda:24GiB").interval
    assert low < high
    assert verdict(f"cuda:{high + 700 * 2**20}B").verdict == "fits"
    assert verdict(f"cuda:{(low + high) // 2 + 475 * 2**20}B").verdict == "unknown"
    assert verdict(f"cuda:{low // 2 + 250 * 2**20}B").verdict == "does not fit"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_operator(kind: type[nn.RNNBase]) -> None:
    model = kind(32, 64, num_layers=2, batch_first=True, bidirectional=True)
    estimated = lowtide.estimate(model, lambda x: model(x)[0].sum().backward(), torch.randn(4, 50, 32), device="L4")
    operators = {event.op for event in estimated.whole if type(event) is Allocate}
    assert not operators & {"aten::mm", "aten::addmm", "aten::sigmoid", "aten::tanh"}  # of which the CPU composes it
    assert operators >= {"aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"}
    assert not any("empty" in name for name in operators)  # which is how it is stood in for
    assert estimated.static.parameters == sum(p.numel() * 4 for p in model.parameters())


def test_statistics_kept_by_a_norm_have_its_name() -> None:
    model = nn.RMSNorm(64)
    found = operators(model, torch.randn(8, 64, requires_grad=True), "L4")
    assert found >= {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}
    assert not any("empty" in name for name in found)


def test_a_step_of_a_gru_by_itself_keeps_five_numbers_a_unit() -> None:
    model, x = nn.GRUCell(32, 64), torch.randn(128, 32)

    def step(batch: torch.Tensor) -> None:
        state = None
        for _ in range(3):
            state = model(batch, state)
        assert state is not None
        state.sum().backward()

    estimated = lowtide.estimate(model, step, x, device="L4")
    kept = [e.bytes for e in estimated.whole if type(e) is Allocate and e.op == "aten::_thnn_fused_gru_cell"]
    assert sorted(kept) == 6 * [128 * 64 * 4] + 6 * [128 * 5 * 64 * 4]
    assert sum(e.bytes for e in estimated.timeline.stream if type(e) is Allocate) > 3 * 128 * 6 * 64 * 4


def test_every_behaviour_has_a_source_and_every_kernel_is_an_operator_of_torch() -> None:
    assert len({row.name for row in BEHAVIOURS}) == len(BEHAVIOURS) >= 20
    assert all(row.does and ("torch" in row.source or "NVIDIA" in row.source) for row in BEHAVIOURS)
    for name in (*KERNELS, *(name for name, _ in kernels())):
        packet, _, overload = name.partition(".")
        assert hasattr(getattr(torch.ops.aten, packet), overload or "default")
    assert all(set(op.behaviours) <= set(BEHAVIOURS) and op.behaviours for op in CUDA_OPS.values())
