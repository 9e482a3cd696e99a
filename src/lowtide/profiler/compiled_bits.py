"""Run compiled code alone during training, where the step is not a function that can be run twice.

Forward runs on the current batch, and backward from the losses that forward returns or, without losses, from fixed
gradients of the outputs. Compiled code that runs backward itself is only called. All state is restored. Runs under two
partitions compare their bits on real data; a run of code without kernels shows the memory that compiled code takes
under a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from lowtide._torch.inductor import watched_calls
from lowtide.memory.measure import make_recorder
from lowtide.profiler.compiled_profile import CALL
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fingerprint import find_device
from lowtide.state.step_outcome import Outcome, digest, is_out_of_memory
from lowtide.state.step_snapshot import StepSnapshot

if TYPE_CHECKING:
    from torch import nn

    from lowtide.memory.events import EventStream


def compiled_bits(model: nn.Module, call: Callable[..., Any], batch: tuple[Any, Any]) -> Outcome | None:
    """Return the outcome of forward and backward of `call` with the arguments in `batch`; None if out of memory."""
    step = _step_of(model, call)
    try:
        with StepSnapshot(model, batch, None, step):
            _without_gradients(model)
            return Outcome.of(model, step, batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None


def record_scheduled_calls(
    model: nn.Module, call: Callable[..., Any], batch: tuple[Any, Any], held: Counter[int]
) -> EventStream | None:
    """Record a forward and backward pass of `call` with the arguments in `batch`, with marks at calls of compiled code.

    Called while inductor generates code without kernels, which allocates memory as usual and computes zeros. Returns
    None if the model raises, as it may at zeros. Outputs are released before backward, except as many of each size in
    bytes as `held` counts: a real step, for example, releases logits after their last use, so that backward frees them
    once it has read them.
    """
    step = _step_of(model, call, held)
    try:
        with StepSnapshot(model, batch, None, step):
            _without_gradients(model)
            step(batch)  # compiles the code: meanwhile dynamo holds objects of the call, such as its outputs
            _without_gradients(model)
            with make_recorder(find_device(model)) as recorder, watched_calls(lambda *data: recorder.mark(CALL, data)):
                step(batch)
    except Exception:  # the real code is measured then
        return None
    return recorder.stream


def _without_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _step_of(
    model: nn.Module, call: Callable[..., Any], held: Counter[int] | None = None
) -> Callable[[tuple[Any, Any]], Any]:
    """Return a step that runs `call`, releases its outputs, and runs backward from its losses or outputs.

    The step returns digests of the outputs. With `held`, it keeps and returns as many outputs of each size in bytes as
    `held` counts.
    """

    def step(given: tuple[Any, Any]) -> Any:
        args, kwargs = given
        result = call(*args, **kwargs)
        if any(parameter.grad is not None for parameter in model.parameters()):  # the call has run backward
            return result
        outputs = [tensor for tensor in collect_tensors(result) if tensor.requires_grad]
        heads = [tensor for tensor in outputs if tensor.numel() == 1] or outputs
        losses = [cast("torch.Tensor", _Loss.apply(head)) for head in heads]  # type: ignore[no-untyped-call]
        result = (
            [*map(_digest_output, collect_tensors(result))] if held is None else _select_by_size(outputs, held.copy())
        )
        del outputs, heads
        if losses:
            torch.autograd.backward(losses)
        return result

    return step


class _Loss(torch.autograd.Function):
    """A loss of zero whose gradient with respect to a tensor is the tensor's cosine.

    The gradient is computed in backward, so it takes no memory before, and it is freed as soon as it was read.
    """

    @staticmethod
    def forward(ctx: Any, head: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(head)
        return head.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        (head,) = ctx.saved_tensors
        return torch.cos(head)


def _digest_output(output: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(digest(output).encode()), dtype=torch.uint8)


def _select_by_size(tensors: list[torch.Tensor], n_of_size: Counter[int]) -> list[torch.Tensor]:
    """Return as many of `tensors` of each size in bytes as `n_of_size` counts, and count `n_of_size` down."""
    chosen = []
    for tensor in tensors:
        n_bytes = tensor.untyped_storage().nbytes()
        if n_of_size[n_bytes]:
            n_of_size[n_bytes] -= 1
            chosen.append(tensor)
    return chosen
