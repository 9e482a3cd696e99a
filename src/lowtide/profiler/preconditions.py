"""Preconditions of a rehearsal: refuse unsupported models and steps, mostly before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lowtide._torch.compiled_code import (
    has_compiled_modules,
    is_compiled,
    is_compiled_by_inductor,
    is_compiled_form,
    is_compiled_function,
)
from lowtide._torch.inductor import hindrances
from lowtide._torch.modules import Convolution
from lowtide.errors import LowtideError, RehearsalError
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.live_optimizers import listed
from lowtide.state.introspection import find_names, find_user_functions, variables
from lowtide.state.process_group import check_sharding, several_processes
from lowtide.state.reachable_state import ReachableState

if TYPE_CHECKING:
    from lowtide.profiler.audit import Audit
    from lowtide.profiler.trace import Trace

SEVERAL_STREAMS = (
    "the model computes in several CUDA streams. What is made again for one of them in backward could be used by "
    "another before it is there: run the model's forward in one stream."
)


NESTED = (
    "nested tensors (torch.nested) go through the model: what they save has no memory of its own that could be planned "
    "or estimated. Pad them, with a mask, or leave that part out of the model that is given here."
)


def check_is_module(model: Any, error: type[LowtideError] = LowtideError) -> None:
    """Raise `error` if `model` is not a module."""
    if not isinstance(model, torch.nn.Module):
        raise error(f"model must be a torch.nn.Module, found {type(model).__name__}.")


def check_can_rehearse(model: Any, step: Any, batch: Any, optimizer: Any = None) -> None:
    """Refuse models, steps and optimizers that can't be rehearsed. Raises RehearsalError."""
    check_step(model, step, batch, optimizer)
    check_sharding(model.modules())


def check_step(model: Any, step: Any, batch: Any, optimizer: Any = None) -> None:
    """Refuse models and steps that can't be rehearsed even in a single process. Raises RehearsalError."""
    check_is_module(model, RehearsalError)
    if not callable(step):
        raise RehearsalError(
            f"step must be a function of the batch that runs forward and backward, found {type(step).__name__}."
        )
    for wrapped in listed(optimizer):
        if not hasattr(wrapped, "param_groups"):
            raise RehearsalError(
                f"optimizer takes a torch.optim.Optimizer or a list of them, found {type(wrapped).__name__}. Leave "
                "optimizer= out: tensors that the step's code reaches are restored without it."
            )
    if not torch.is_grad_enabled():  # also for tensors made in inference mode
        block = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RehearsalError(
            f"this is called inside torch.{block}(), where no forward has a backward: call it outside that block."
        )
    if not model.training:
        raise RehearsalError(
            f"{type(model).__name__} is in eval mode: its plan would not hold in training. Call model.train() first."
        )
    if not any(p.requires_grad for p in model.parameters()) and not _may_train_input(step, batch):
        raise RehearsalError(
            f"no parameter of {type(model).__name__} requires a gradient, nor does anything else in the step: there "
            "is no backward to plan."
        )
    named = (content for function in find_user_functions(step) for _, _, content in variables(function))
    check_not_in_zero(*(content for content in (model, *named) if isinstance(content, torch.nn.Module)))
    check_one_device(model)


def check_not_in_zero(*modules: Any) -> None:
    """Refuse engines of DeepSpeed in a ZeRO stage. Raises RehearsalError."""
    for module in modules:
        is_engine = any(base.__module__.partition(".")[0] == "deepspeed" for base in type(module).__mro__)
        if is_engine and module.zero_optimization():
            raise refuse_deepspeed(f"this {type(module).__name__}")


def refuse_deepspeed(who: str) -> RehearsalError:
    """Return the error for a loop whose memory DeepSpeed's ZeRO manages; `who` names the loop in the message."""
    return RehearsalError(
        f"{who} trains by DeepSpeed, whose ZeRO stages own parameters, gradients and updates: how much memory a step "
        "needs can't be measured from outside, and nothing is planned. Train without it, in its stage 0, or with "
        "torch's fully_shard (FSDP2)."
    )


def _may_train_input(step: Any, batch: Any) -> bool:
    """Return True if the step may compute gradients through a frozen model for its input, such as a prompt or an
    image.
    """
    tensors = (*collect_tensors(batch), *ReachableState(step).tensors)
    says = any(
        "requires_grad" in name for function in find_user_functions(step) for name in find_names(function.__code__)
    )
    return says or any(tensor.requires_grad for tensor in tensors)


def check_one_device(model: torch.nn.Module) -> None:
    """Refuse a model that is spread over devices, because memory is planned for one device. Raises RehearsalError."""
    if isinstance(model, torch.nn.DataParallel) and len(model.device_ids) > 1:
        raise RehearsalError(
            f"torch.nn.DataParallel runs copies of the model on {len(model.device_ids)} devices, and memory is planned "
            "for one. Let the process see one of them (CUDA_VISIBLE_DEVICES=0), or start a process for each."
        )
    places = sorted({str(p.device) for p in model.parameters()})
    if len(places) > 1:
        raise RehearsalError(
            f"parameters of {type(model).__name__} are on {' and '.join(places)}: memory is planned for one. Put "
            "the whole model on one device, or fit only the part on the device that is short of memory."
        )


def list_nondeterminism_notes(model: torch.nn.Module, place: torch.device) -> tuple[str, ...]:
    """Return notes on nondeterminism that may change bits although the rehearsal found no difference."""
    cudnn = torch.backends.cudnn
    convolves = any(isinstance(module, Convolution) for module in model.modules())
    if place.type == "cuda" and convolves and cudnn.benchmark and not cudnn.deterministic:
        return (
            "torch.backends.cudnn.benchmark is on: convolutions that are run again in backward may take another "
            "algorithm and give other bits, unless torch.backends.cudnn.deterministic is on, too",
        )
    return ()


def by_contents(audit: Audit) -> tuple[str, ...]:
    """Return a note on operators of the audited step whose memory depends on the contents of tensors, if any."""
    if not audit.by_contents:
        return ()
    where = ", ".join(f"{operator} in {path or 'the model'}" for operator, path in audit.by_contents.items())
    return (
        f"some memory depends on the contents of tensors ({where}): another step with a batch of the same size may "
        "need more than this one, and go above the budget",
    )


def check_not_scripted(model: torch.nn.Module) -> None:
    """Refuse a model that is TorchScript as a whole. Raises RehearsalError."""
    scripted = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    if any(_is_all_of(module, model) for module in scripted):
        raise RehearsalError(
            f"{getattr(model, 'original_name', type(model).__name__)} is TorchScript as a whole (torch.jit.script or "
            "torch.jit.trace), whose own executor decides what it keeps for backward.\n"
            "  Train the module that it was made from, and script it after training; or script its repeated blocks "
            "alone: `model.layers[i] = torch.jit.script(model.layers[i])`. Such blocks can be planned for."
        )


def is_planned_by_its_compiler(model: torch.nn.Module, step: Any) -> bool:
    """Return True if torch.compile compiles the whole model, so that only the compiler can carry out a plan."""
    return is_compiled(model) or _compiles_around(model, step)


def has_planned_blocks(model: torch.nn.Module) -> bool:
    """Return True if inductor compiles blocks of the model, not all of it, and plans can decide what they save."""
    if is_compiled(model) or not any(map(is_compiled_by_inductor, model.modules())):
        return False
    return not several_processes() and not any(True for _ in hindrances())


def _compiles_around(model: torch.nn.Module, step: Any) -> bool:
    """Return True if the step calls a compiled function (torch.compile) that calls `model`."""
    return any(True for _ in _find_compiled_around(model, step))


def _find_compiled_around(model: torch.nn.Module, step: Any) -> Iterator[Any]:
    """Yield compiled callables that call `model`: `step` itself, or functions and `torch.compile(model)` in it."""
    functions = {id(value): value for function in find_user_functions(step) for _, _, value in variables(function)}
    for obj in (step, *functions.values()):
        is_around = is_compiled_function(obj) and any(value is model for value in _list_named_by(obj))
        if is_around or is_compiled_form(obj, model):
            yield obj


def _list_named_by(function: Any) -> Iterator[Any]:
    return (value for inner in find_user_functions(function) for _, _, value in variables(inner))


def check_updates_outside(function: Any) -> None:
    """Refuse a compiled function that updates parameters itself. Raises RehearsalError."""
    for inner in find_user_functions(function):
        if "step" in find_names(inner.__code__) and any(isinstance(o, Optimizer) for _, _, o in variables(inner)):
            raise RehearsalError(
                f"the compiled function {inner.__qualname__} updates parameters itself (it calls step() of an "
                "optimizer), and an update is not seen in compiled code.\n  Leave optimizer.step() and zero_grad() out "
                "of the compiled function, and call them after it."
            )


def check_compiled(model: torch.nn.Module, step: Any = None) -> None:
    """Refuse settings and wrappers with which compiled code can't be planned for. Raises RehearsalError."""
    for function in () if step is None else _find_compiled_around(model, step):
        check_updates_outside(function)
    name = type(getattr(model, "_orig_mod", model)).__name__
    for why in hindrances():
        raise RehearsalError(f"no plan can be made for {name} as it is compiled: {why}.")
    if several_processes():
        raise RehearsalError(
            f"{name} is compiled as a whole in one of several processes that train together, which is not planned for "
            "yet.\n  Compile its repeated blocks instead, each in place: `for block in model.layers: "
            "block.compile()`."
        )


def _is_all_of(part: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Return True if `part` has all parameters of `model`."""
    return {*map(id, model.parameters())} <= {*map(id, part.parameters())}


def check_saved(model: torch.nn.Module, audit: Audit) -> None:
    """Refuse a step that saves tensors only where no plan can decide about them. Raises RehearsalError."""
    if not audit.step.slots and audit.bypassed is not None:
        raise RehearsalError(f"{type(model).__name__} was called {audit.bypassed}")


def check_same_work(model: torch.nn.Module, audit: Audit, trace: Trace) -> None:
    """Refuse a step that does different work when it is run again. Raises RehearsalError."""
    for one, other in zip(audit.inputs, trace.inputs, strict=False):
        if one != other and len(one) == len(other):  # otherwise the first run may have created state
            raise RehearsalError(
                f"the step called {type(model).__name__} with {', '.join(one)} in one run and with {', '.join(other)} "
                "in the next. It must do the same work each time that it is given the same batch: draw the batch "
                "outside the step, and pass it in."
            )
    if not did_same_work(audit, trace):
        raise RehearsalError(
            f"the step saved {len(audit.step.slots)} tensors in one run and {trace.packs} in the next. It must do the "
            "same work each time that it is given the same batch and random numbers, also after an update of its "
            "parameters."
        )


def did_same_work(audit: Audit, trace: Trace) -> bool:
    """Return True if both runs of a step saved the same number of tensors."""
    return trace.packs == len(audit.step.slots)


def is_specialised(model: torch.nn.Module) -> bool:
    """Return True if parts of the model are compiled or TorchScript: these save different tensors in later runs."""
    return has_torchscript(model) or has_compiled_modules(model)


def has_torchscript(model: torch.nn.Module) -> bool:
    """Return True if parts of the model are TorchScript."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
