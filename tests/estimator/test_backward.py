"""Backward passes whose memory depends on how autograd itself computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide


def enlarged(x: Tensor, mode: str, size: int, form: torch.memory_format) -> Tensor:
    images = x.view(-1, 10, size, size).contiguous(memory_format=form)
    return functional.interpolate(images, scale_factor=2, mode=mode)


HALF = torch.arange(400 * 500).view(400, 500) % 2 == 0
ADJACENCY = torch.eye(400).roll(7, 0).to_sparse()

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sums in a formula": lambda x: sum(torch.std_mean(x, 1)),
    "gradients of zeros": lambda x: torch.sgn(x).abs(),
    "group norm of channels last": lambda x: functional.group_norm(
        x.view(-1, 10, 20, 20).contiguous(memory_format=torch.channels_last), 2
    ).square(),
    "pooling in one dimension": lambda x: functional.avg_pool1d(x.view(10, 10, -1), 2),
    "mean cross entropy of two": lambda x: functional.binary_cross_entropy_with_logits(x, HALF / 1.0, reduction="mean"),
    "cross entropy of two": lambda x: functional.binary_cross_entropy_with_logits(x, HALF.float()),
    "weighted cross entropy of two": lambda x: functional.binary_cross_entropy_with_logits(
        x, HALF.float(), weight=HALF + 1.0, pos_weight=torch.ones(500)
    ),
    "logits": lambda x: x.logsumexp(0),
    "a norm of columns": lambda x: functional.layer_norm(x.t(), [400]).square(),
    "inverse": lambda x: torch.linalg.inv(x[:, :100] @ x[:, :100].t() + torch.eye(400)),
    "roll": lambda x: x.view(40, 10, -1).roll((1, 2, 3), (0, 1, 2)),
    "elements by a mask": lambda x: x[HALF],
    "written by a mask": lambda x: x.index_put((HALF,), x[~HALF]),
    "filled by a mask": lambda x: x.index_put((HALF,), torch.zeros(())),
    "a sparse matrix": lambda x: ADJACENCY @ x,
    "distances": lambda x: torch.cdist(x, x[:50]),
    **{
        f"{mode} of {size}, {form}": lambda x, mode=mode, size=size, form=form: enlarged(x, mode, size, form)
        for mode in ("bilinear", "nearest", "bicubic")
        for size in (20, 100)
        for form in (torch.contiguous_format, torch.channels_last)
    },
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_needs_what_it_is_measured_to_need(name: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.rand(400, 500))])

    def step(_: Tensor) -> None:
        STEPS[name](model[0] * 0.9).sum().backward()
        model.zero_grad()

    estimated, measured = (f(model, step, torch.ones(1)) for f in (lowtide.estimate, lowtide.timeline))
    assert estimated.timeline.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.005)
    assert estimated.unknown == ()


def test_a_gradient_of_zeros_that_has_no_memory_is_not_read() -> None:
    model = nn.ParameterList([nn.Parameter(torch.rand(5))])  # so small that its contents are known

    def step(_: Tensor) -> None:
        torch.sgn(model[0] * 1).abs().sum().backward()
        model.zero_grad()

    assert lowtide.estimate(model, step, torch.ones(1)).peak_bytes > 0
