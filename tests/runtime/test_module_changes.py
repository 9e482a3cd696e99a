"""Additions to a model after its plan: the same bits as without the plan, and a message that names the addition."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

import lowtide
from lowtide.planner import find_smallest_peak
from lowtide.planner.records import Plan
from lowtide.runtime.engine import Engine
from lowtide.runtime.module_changes import AsPlanned
from lowtide.runtime.plan_table import parse_actions

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))))


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def taken(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """A step's loss and gradients, and the buffers after it."""
    loss: Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters()), *(buffer.clone() for buffer in model.buffers())]
    model.zero_grad()
    return found


@pytest.fixture(scope="module")
def given() -> Tensor:
    return torch.randn(64, 8, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plan(given: Tensor) -> Plan:
    """The plan with the smallest peak: it runs blocks again."""
    model = made()
    profile = lowtide.rehearse(model, lambda x: taken(model, x), given)
    found = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes)
    assert "1#0" in found.replay
    return found


class Noisy(nn.Module):
    """A linear layer with buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(x))
        return result


class Counting:
    """A hook that does something else at each call."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        self.n += 1
        return output * (1 + self.n / 8)


def written_over(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    output.mul_(0.5)


def written_before(module: nn.Module, args: tuple[Tensor]) -> None:
    with torch.no_grad():
        args[0].mul_(1.5)


def clamped(module: nn.Module, args: tuple[Tensor]) -> None:
    with torch.no_grad():
        module.weight.clamp_(-0.1, 0.1)  # type: ignore[operator, union-attr]


def doubled(module: nn.Module) -> None:
    own = module.forward
    module.forward = lambda x: own(x) * 2  # type: ignore[method-assign]


PUT_ON: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "prune": (lambda block: prune.l1_unstructured(block.wide, "weight", 0.3), "1.wide has the hook torch.nn.utils."),
    "weight norm of old": (lambda block: weight_norm(block.wide), "1.wide has the hook torch.nn.utils.weight_norm."),
    "spectral norm of old": (
        lambda block: nn.utils.spectral_norm(block.wide),
        "1.wide has the hook torch.nn.utils.spectral_norm.SpectralNorm",
    ),
    "weight norm": (lambda block: parametrizations.weight_norm(block.wide), "1.wide is a ParametrizedLinear"),
    "spectral norm": (lambda block: parametrizations.spectral_norm(block.wide), "1.wide is a ParametrizedLinear"),
    "counting hook": (
        lambda block: block.wide.register_forward_hook(Counting()),
        "test_module_changes.Counting since",
    ),
    "writing hook": (lambda block: block.wide.register_forward_hook(written_over), "test_module_changes.written_over"),
    "pre-hook": (lambda block: block.narrow.register_forward_pre_hook(written_before), "1.narrow has the hook"),
    "pre-hook on weights": (lambda block: block.wide.register_forward_pre_hook(clamped), "1.wide has the hook"),
    "module": (lambda block: setattr(block, "wide", Noisy()), "1 has another module at wide (Noisy)"),
    "forward": (lambda block: doubled(block.wide), f"1.wide has another forward, of {__name__}.doubled."),
    "dropout's p": (lambda block: setattr(block.dropout, "p", 0.5), ""),
    "dtype": (lambda block: block.double(), ""),
    "frozen": (lambda block: block.requires_grad_(False), ""),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("what", PUT_ON)
def test_later_additions_to_modules_keep_the_bits_and_are_named(what: str, plan: Plan, given: Tensor) -> None:
    put_on, words = PUT_ON[what]

    def trained(apply: Callable[[nn.Module], object]) -> list[Tensor | None]:
        model = made()
        apply(model)
        taken(model, given)
        for part in model if what == "dtype" else model[1:2]:
            put_on(part)
        torch.manual_seed(2)
        return [tensor for _ in range(2) for tensor in taken(model, given)]

    said: list[str] = []
    plain, planned = trained(lambda model: None), trained(lambda model: lowtide.apply(model, plan, say=said.append))
    for one, other in zip(plain, planned, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert not words or any(words in line for line in said), said


def test_removals_from_modules_are_no_change() -> None:
    block = Block()
    hooks = [block.wide.register_forward_hook(written_over), block.register_forward_pre_hook(written_before)]
    before = AsPlanned(block, "1")
    for hook in hooks:
        hook.remove()
    assert before.change() is None
    with nn.modules.module.register_module_forward_hook(written_over):
        assert before.change() == f"every module has the hook {__name__}.written_over"
    del block.wide
    assert before.change() == "1 has no module at wide any longer"


def test_other_parameters_and_buffers_are_named() -> None:
    layer = nn.Linear(2, 2)
    before = AsPlanned(layer, "1.wide")
    layer.register_buffer("mask", torch.ones(2))
    assert before.change() == "1.wide has mask and had nothing"
    del layer.bias
    assert before.change() == "1.wide has mask and had bias"
    del layer.mask
    assert before.change() == "1.wide has nothing and had bias"


def test_a_pruned_weight_that_moves_a_planned_tensor_is_reported() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.randn(64, WIDTH)
    engine = Engine(model, parse_actions({"2#0:0": "TanhBackward0"}, ()))
    engine.install()
    try:
        prune.l1_unstructured(model[2], "weight", 0.3)  # its mask is now the first tensor that the call saves
        with pytest.warns(UserWarning, match=r"saves different tensors than the rehearsed step \(first at 2#0:0\)"):
            model(x).sum().backward()
    finally:
        engine.remove()
