"""Memory of cuBLAS and cuDNN, compared with measurements on a GPU: data/cudnn_h200.json."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.estimator.cuda.ops import convolution
from lowtide.estimator.cuda.ops import matmul as products
from lowtide.estimator.cuda.ops.rnn import MANY, count_workspace_bytes, reserve_bytes
from lowtide.memory.events import Allocate
from lowtide.memory.gpu_specs import parse_gpu

MEASURED = json.loads((Path(__file__).parent / "data" / "cudnn_h200.json").read_text())["rows"]
BYTES = {"torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2}


def recurrent(row: dict[str, Any]) -> tuple[str, int, dict[str, Any], int]:
    kind = {"LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh"}[row["what"]]
    settings = {"layers": row["layers"], "directions": 1 + row["bi"], "in": row["I"], "out": row["H"]}
    settings |= {"hidden": row["H"], "batch": row["B"], "dropout": row["drop"] > 0}
    return kind, row["T"] * row["B"], settings, BYTES[row["dtype"]]


def test_the_reserves_of_recurrent_layers_are_known_to_the_byte() -> None:
    rows = [row for row in MEASURED if row["what"] != "conv"]
    assert len(rows) == 39
    for row in rows:
        taken = [n for n in row["forward"] if n > 0 and -n not in row["forward"]]
        assert reserve_bytes(*recurrent(row)) == taken[-1], row


def test_their_workspaces_are_known_within_a_tenth() -> None:
    errors = []
    for row in MEASURED:
        if row["what"] == "conv" or row["dtype"] == "torch.bfloat16":  # whose products are others
            continue
        (taken,) = {-n for n in row["forward"] if n < 0}
        errors.append(count_workspace_bytes(*recurrent(row)) / taken - 1)
        if row["what"] == "LSTM" and not row["bi"] and row["H"] < MANY and row["I"] < MANY:
            assert errors[-1] == pytest.approx(0, abs=0.01), row
    assert statistics.median(map(abs, errors)) < 1e-4
    assert max(map(abs, errors)) < 0.11


def test_no_workspace_of_a_convolution_was_above_its_bound() -> None:
    most = 0.0
    for row in (row for row in MEASURED if row["what"] == "conv"):
        size, n = BYTES[row["dtype"]], row["n"]
        pad = {1: 0, 3: 1, 7: 3, 16: 0}[row["ks"]]
        out = (row["hw"] + 2 * pad - row["ks"]) // row["stride"] + 1
        three = size * n * (row["c"] * row["hw"] ** 2 + row["k"] * out**2)
        three += size * row["k"] * row["c"] // row["groups"] * row["ks"] ** 2
        taken = max((-n for n in (*row["forward"], *row["backward"]) if n < 0), default=0)
        assert taken <= convolution.MOST_TIMES * three + convolution.MOST_MORE
        most = max(most, taken / three)
    assert most > 19  # so it is not the sizes alone


def estimated(model: nn.Module, batch: torch.Tensor, device: str = "H100-80") -> lowtide.MemoryEstimate:
    def step(x: torch.Tensor) -> None:
        model(x).float().square().mean().backward()

    return lowtide.estimate(model, step, batch, device=device)


@pytest.mark.parametrize(("is_shared", "n"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_cublaslt_has_a_workspace_of_its_own_before_torch_2_13(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool, n: int, bias: bool
) -> None:
    monkeypatch.setattr(products, "_IS_SHARED", is_shared)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=bias) for _ in range(2)))
    events = estimated(model, torch.randn(8, 32)).whole
    taken = [e.bytes for e in events if type(e) is Allocate and e.op == products.LT_WORKSPACE]
    assert taken == [2**20] * (n if bias else 0)


@pytest.mark.parametrize(("transposed", "kernel"), [(False, "efficient"), (True, "math")])
def test_no_fused_attention_takes_a_mask_whose_rows_do_not_lie_together(transposed: bool, kernel: str) -> None:
    """As the position bias of T5."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(1, 4, 16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = self.bias.mT if transposed else self.bias
            return nn.functional.scaled_dot_product_attention(x, x, x, bias)

    events = estimated(Biased(), torch.randn(2, 4, 16, 8, requires_grad=True)).timeline.stream
    ops = {e.op for e in events if type(e) is Allocate}
    assert ("aten::_scaled_dot_product_efficient_attention" in ops) == (kernel == "efficient")


@pytest.mark.parametrize(("gpu", "kernel", "copied"), [("H100-80", 3, True), ("H100-80", 1, False), ("L4", 3, False)])
def test_hopper_takes_copies_for_convolutions_in_tf32(gpu: str, kernel: int, copied: bool) -> None:
    conv = nn.Conv2d(64, 64, kernel, padding=kernel // 2, bias=False)
    x = torch.randn(4, 64, 32, 32)
    events = estimated(conv, x, gpu).timeline.stream
    taken = [e.bytes for e in events if type(e) is Allocate and e.op == "aten::convolution"]
    assert (2 * x.nbytes + conv.weight.nbytes in taken) == copied
    assert parse_gpu(gpu).capability is not None
