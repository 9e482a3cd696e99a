"""What a step reaches, put on the GPU and back: the same Python objects all the time."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from lowtide._torch.autograd_graph import nodes_behind
from lowtide._torch.fake_modes import is_fake, is_strided, make_parameter
from lowtide._torch.tensors import share_hooks
from lowtide.errors import RehearsalError
from lowtide.estimator import sparse_tensors as sparse
from lowtide.estimator.fake_tensors import FakeTensors, swap
from lowtide.runtime.fingerprint import tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.values.assumptions import ValueOracle


class GpuPlacement:
    """Tensors that `put` has put on the device of `twins` are fake ones there until this block ends.

    `is_there`: whether a real tensor is on a GPU already. Of others, pieces of larger memory come alone. With
    `let_go` one that nobody else refers to any longer is on the GPU no longer.
    """

    def __init__(
        self, twins: FakeTensors, answers: ValueOracle, is_there: Callable[[Tensor], bool], *, let_go: bool = False
    ) -> None:
        self._twins, self._answers, self._is_there, self._let_go = twins, answers, is_there, let_go
        self._done: list[tuple[Callable[[], Tensor | None], Tensor]] = []

    def has(self, tensor: Tensor) -> bool:
        """Whether it was put there."""
        return any(tensor is placed() for placed, _ in self._done)

    def put(self, tensors: Iterable[Tensor], resized: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Exchange tensors that are given for fake leaves, gradients included. Raises RehearsalError for those that
        torch can't.
        """
        done = {id(placed()) for placed, _ in self._done}
        for tensor in {id(t): t for t in tensors}.values():
            if id(tensor) in done or is_fake(tensor) or not is_given(tensor):
                continue
            if sparse.is_compressed(tensor):
                raise RehearsalError(
                    f"a tensor of layout {tensor.layout} can't be on a GPU that is not there: fake ones have no "
                    "elements.\n  Give it as COO (`tensor.to_sparse_coo()`)."
                )
            shown = resized(tensor)
            fake = self._twins.apart(shown) if self._comes_alone(shown) else self._twins.of(shown)
            self._answers.introduce(fake, shown)
            if isinstance(tensor, nn.Parameter):
                make_parameter(fake, tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
            share_hooks(tensor, fake)
            if tensor.is_leaf and tensor.grad is not None:
                fake.grad = self._twins.of(tensor.grad)
            swap(tensor, fake)
            real = fake if shown is tensor else shown  # they have changed places
            self._done.append((self._reference(tensor, real), fake))

    def _reference(self, tensor: Tensor, real: Tensor) -> Callable[[], Tensor | None]:
        if not self._let_go:
            return lambda: tensor
        return weakref.ref(tensor, lambda _: self._twins.let_go(real))

    def _comes_alone(self, tensor: Tensor) -> bool:
        is_piece = is_strided(tensor) and tensor.nbytes < tensor.untyped_storage().nbytes()
        return is_piece and not isinstance(tensor, nn.Parameter) and not self._is_there(tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # a failed step's frames hold graphs that hold parameters
        for placed, fake in reversed(self._done):
            if (tensor := placed()) is not None:
                tensor.grad = None
                swap(tensor, fake)
        self._done.clear()


def belongings(model: nn.Module, batch: Any, reached: Iterable[Any]) -> list[Tensor]:
    """What is on the GPU when a step begins, in the order in which a script puts it there.

    The model, other modules, parameters and state of optimizers that the step reaches, others that it trains by itself,
    the batch.
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
        found += [parameter for group in optimizer.param_groups for parameter in group["params"]]  # some in no module
        found += _state(optimizer)
    found += (t for t in reached if isinstance(t, torch.Tensor) and t.requires_grad and is_given(t))
    return found + tensors_in(batch)


def is_given(tensor: Tensor) -> bool:
    """Whether a step may take it as it is: a leaf, or computed from leaves alone that are no parameters, as points in
    space are that derivatives are asked for.
    """
    return tensor.is_leaf or not any(
        isinstance(getattr(node, "variable", None), nn.Parameter) for node in nodes_behind([tensor])
    )


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
