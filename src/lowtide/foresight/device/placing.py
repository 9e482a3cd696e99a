"""What a step reaches, put on the card and back: the same Python objects all the time."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import _torch
from lowtide.foresight.twins import Twins, swap
from lowtide.identity import tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.foresight.answers import Answers


@contextlib.contextmanager
def on_card(tensors: Iterable[Tensor], twins: Twins, answers: Answers) -> Iterator[None]:
    """In this block these tensors are fake ones on the device of `twins`, gradients included.

    Raises RehearsalError for those that torch can't exchange.
    """
    done: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in {id(t): t for t in tensors if t.is_leaf and not _torch.is_fake(t)}.values():
            fake = twins.of(tensor)
            answers.introduce(fake, tensor)
            if isinstance(tensor, nn.Parameter):
                _torch.make_parameter(fake, tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
            if tensor.grad is not None:
                fake.grad = twins.of(tensor.grad)
            swap(tensor, fake)
            done.append((tensor, fake))
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # a failed step's frames hold graphs that hold parameters
        raise
    finally:
        for tensor, fake in reversed(done):
            tensor.grad = None
            swap(tensor, fake)


def belongings(model: nn.Module, batch: Any, reached: Iterable[Any]) -> list[Tensor]:
    """What is on the card when a step begins, in the order in which a script puts it there.

    The model, other modules and the state of optimizers that the step reaches, the batch.
    """
    found: list[Tensor] = []
    _module(model, found)
    optimizers = []
    for thing in reached:
        if isinstance(thing, nn.Module):
            _module(thing, found)
        elif isinstance(thing, torch.optim.Optimizer):
            optimizers.append(thing)
    for optimizer in optimizers:
        found += _state(optimizer)
    return found + tensors_in(batch)


def _module(module: nn.Module, found: list[Tensor]) -> None:
    """As `module.cuda()` goes about it: a module's children before what is its own."""
    for child in module.children():
        _module(child, found)
    found += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Counters of steps stay on the CPU, unless the optimizer is fused or capturable."""
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for entry in optimizer.state.values():
        for name, tensor in entry.items() if isinstance(entry, dict) else ():
            if isinstance(tensor, torch.Tensor) and (name != "step" or on_device):
                yield tensor
