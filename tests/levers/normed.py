"""Models, a loop that clips by the common norm of all gradients, and what the lever `step in backward` does to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from levers.cases import pulled, untouched
from lowtide.levers import LEVERS
from lowtide.levers.lever import Settings, StepContext

NAME = "step in backward"
FEATURES = 12
Step = Callable[[Any], Tensor]
LossOf = Callable[[nn.Module, Any], Tensor]


class Normed(nn.Module):
    """Batch norm, dropout, and a weight that is used twice. Gives one output, or more in an object of some kind."""

    def __init__(self, kind: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.last = nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight
        self.shift = nn.Parameter(torch.randn(FEATURES, dtype=torch.float64))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = functional.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        mean = self.last(hidden) + self.shift.float()
        return mean if self.kind is None else self.kind(mean, hidden.tanh())


class Named(NamedTuple):
    mean: Tensor
    spread: Tensor


@dataclass
class Held:
    mean: Tensor
    spread: Tensor


def batch_of() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(16, FEATURES)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch)
    return found.square().mean()


def step_of(
    model: nn.Module,
    optimizer: Any,
    loss_of: LossOf = squares,
    *,
    clip: Callable[[nn.Module], Any] | None = None,
    max_norm: float = 0.01,
    **more: Any,
) -> Step:
    """A loop's step that clips by the common norm, if `clip` says nothing else."""

    def step(batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm, **more) if clip is None else clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def found_out(model: nn.Module, step: Step, batch: Any, optimizer: Any) -> Settings:
    return LEVERS[NAME].settings(StepContext(model, step, batch, optimizer))


def results(made: Callable[[], nn.Module], kind: Any, batch: Any, *, steps: int = 3, **step_with: Any) -> list[Any]:
    """Results of some steps, buffers and random numbers included: of the plain loop, and with the lever."""
    found = []
    for is_on in (False, True):
        model = made()
        optimizer = kind(model.parameters(), lr=1e-2)
        step = step_of(model, optimizer, **step_with)
        settings = found_out(model, step, batch, optimizer) if is_on else {}
        torch.manual_seed(2)
        with pulled(model, *(NAME,) * is_on, optimizer=optimizer, **settings):
            left = after(model, optimizer, step, batch, steps)
        assert untouched(model)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        found.append(left)
    return found


def after(model: nn.Module, optimizer: Any, step: Step, batch: Any, n: int) -> dict[str, Tensor]:
    left = {f"loss {i}": step(batch) for i in range(n)}
    left |= {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for i, parameter in enumerate(model.parameters()):
        left |= {f"{i} {k}": v.clone() for k, v in optimizer.state.get(parameter, {}).items() if torch.is_tensor(v)}
    return left | {"random": torch.get_rng_state()}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)
