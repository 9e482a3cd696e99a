"""Patches of torch's functions while a script's memory is estimated, for this machine or for an absent GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

import torch
from torch import nn

from lowtide._torch.backward import ENGINE
from lowtide._torch.checkpointed_functions import observe_checkpoints
from lowtide._torch.distributed import meshes_on
from lowtide._torch.fake_modes import function_modes_in_backward
from lowtide._torch.fsdp import meta_parameters_ungathered
from lowtide._torch.modules import apply_to_tensors
from lowtide._torch.patching import replace_function
from lowtide.errors import RehearsalError
from lowtide.estimator.compiled_collectives import remember_compiled
from lowtide.estimator.cuda import process_groups as groups
from lowtide.estimator.cuda.memory_stats import Usage
from lowtide.estimator.cuda.redirect import emulated_cuda
from lowtide.memory.allocator.config import AllocatorConfig

if TYPE_CHECKING:
    from lowtide.estimator.absent_processes import AbsentProcesses
    from lowtide.memory.gpu_specs import GpuSpec
    from lowtide.script.estimate_steps import StepEstimator


@contextlib.contextmanager
def steps_of_a_script(listener: StepEstimator) -> Iterator[None]:
    """Report backward passes and checkpoints to `listener` inside this block, and run compiled code uncompiled."""

    def compiles(model: Any = None, **options: Any) -> Any:
        listener.compiles = True
        if model is None:
            return functools.partial(compiles, **options)
        remember_compiled(model)
        return model

    def runs_back(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done = run(*args, **kwargs)
        listener.on_backward_end()
        return done

    def checkpoints(function: Any, arguments: tuple[Any, ...], is_reentrant: bool) -> None:
        listener.on_checkpoint(function, arguments)

    with contextlib.ExitStack() as stack:
        stack.callback(replace_function(torch.autograd, ENGINE, functools.partial(functools.partial, runs_back)))
        stack.callback(observe_checkpoints(checkpoints))
        stack.enter_context(patch.object(torch, "compile", compiles))
        stack.enter_context(patch.object(nn.Module, "compile", lambda self, *args, **kwargs: compiles(self)))
        yield


@contextlib.contextmanager
def cuda_for_a_script(gpu: GpuSpec, listener: StepEstimator, processes: AbsentProcesses | None) -> Iterator[None]:
    """Within this block, let a script use `gpu` before its first forward, while its tensors stay on the CPU.

    The script runs as one of `processes`, if given.
    """
    importlib.import_module("torch._dynamo")  # imported for the same reason as in `emulated_cuda`
    with contextlib.ExitStack() as stack:
        if processes is not None:
            stack.enter_context(processes.around())
            stack.enter_context(meshes_on("cpu"))
            stack.enter_context(patch.object(nn.Module, "to_empty", _on_meta(nn.Module.to_empty, listener)))
            stack.enter_context(meta_parameters_ungathered(_refuse_evaluation))
        for owner, name, function in groups.replacements(processes):
            stack.enter_context(patch.object(owner, name, function))
        if not torch.cuda.is_available():
            usage = Usage(listener.asked, AllocatorConfig.from_environment())
            stack.enter_context(emulated_cuda(gpu, listener.asked, usage))
            stack.enter_context(function_modes_in_backward())
        yield


def _refuse_evaluation() -> NoReturn:
    raise RehearsalError(
        "the model is called before its first training step, as for an evaluation, and its parameters are on the meta "
        "device: `to_empty` takes no memory in an estimate.\n  Leave that call out for the estimate."
    )


def _on_meta(to_empty: Callable[..., Any], listener: StepEstimator) -> Callable[..., Any]:
    """Wrap `Module.to_empty` so that CUDA parameters stay on the meta device, and no part of a model takes memory."""

    @functools.wraps(to_empty)
    def made(module: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        if listener.answers is not None or device is None or torch.device(device).type == "cpu":
            return to_empty(module, device=device, recurse=recurse)  # type: ignore[no-any-return]

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device="meta" if isinstance(tensor, nn.Parameter) else device)

        apply_to_tensors(module, moved, recurse=recurse)
        listener.asked.put(module.parameters(recurse))
        return module

    return made
