"""What can't be rehearsed is refused before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch import CALL, is_compiled
from lowtide.errors import RehearsalError
from lowtide.remat.seam import Front, Seam

if TYPE_CHECKING:
    from lowtide.rehearsal.audit import Audit
    from lowtide.rehearsal.trace import Trace

SEVERAL_STREAMS = (
    "the model computes in several CUDA streams. What is made again for one of them in backward could be used by "
    "another before it is there: run the model's forward in one stream."
)


def check(model: Any, step: Any) -> None:
    """Refuse what can't be rehearsed. Raises RehearsalError."""
    if not isinstance(model, torch.nn.Module):
        raise RehearsalError(f"model must be a torch.nn.Module, found {type(model).__name__}.")
    if not callable(step):
        raise RehearsalError(
            f"step must be a function of the batch that runs forward and backward, found {type(step).__name__}."
        )
    if not model.training:
        raise RehearsalError(
            f"{type(model).__name__} is in eval mode: its plan would not hold in training. Call model.train() first."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise RehearsalError(
            f"no parameter of {type(model).__name__} requires a gradient: there is no backward to plan."
        )
    check_one_device(model)


def check_one_device(model: torch.nn.Module) -> None:
    """Refuse a model that is spread over devices: the peak of each would have to be planned. Raises RehearsalError."""
    places = sorted({str(p.device) for p in model.parameters()})
    if len(places) > 1:
        raise RehearsalError(
            f"parameters of {type(model).__name__} are on {' and '.join(places)}: memory is planned for one. Put "
            "the whole model on one device, or fit the part of it that is on the device in need."
        )


def check_uncompiled(model: torch.nn.Module, *, wrapped: bool = True) -> None:
    """Refuse modules that `Module.compile` compiled, or, if `wrapped`, `torch.compile`: these decide what they keep.

    Raises RehearsalError.
    """
    for path, module in model.named_modules():
        front = module.__dict__.get(CALL)
        if (wrapped and is_compiled(module)) or not (front is None or isinstance(front, Seam | Front)):
            what = f"{path} is" if path else "the model is"
            raise RehearsalError(
                f"{what} compiled (torch.compile), and compiled code decides by itself what it keeps for backward. Fit "
                "the model as it was before torch.compile, or give the compiled code a budget of its own: "
                "torch._functorch.config.activation_memory_budget = 0.5."
            )


def check_same_work(model: torch.nn.Module, audit: Audit, trace: Trace) -> None:
    """Refuse a step that does other work when it is run again. Raises RehearsalError."""
    for one, other in zip(audit.inputs, trace.inputs, strict=False):
        if one != other and len(one) == len(other):  # else it may be a state that the first run begins
            raise RehearsalError(
                f"the step called {type(model).__name__} with {', '.join(one)} in one run and with {', '.join(other)} "
                "in the next. It must do the same work each time that it is given the same batch: draw the batch "
                "outside of the step, and pass it in."
            )
    if trace.packs != len(audit.slots):
        raise RehearsalError(
            f"the step saved {len(audit.slots)} tensors in one run and {trace.packs} in the next. It must do the same "
            "work each time that it is given the same batch and random numbers."
        )


def is_specialised(model: torch.nn.Module) -> bool:
    """Whether parts of the model are TorchScript, which saves other tensors once it has seen what it is given."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
