"""Move the tensors that a step reaches to the GPU and back. The Python objects stay the same."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from lowtide._torch.autograd_graph import find_nodes_behind
from lowtide._torch.distributed import is_wrapping, make_distributed_like
from lowtide._torch.fake_modes import is_fake, is_strided, make_parameter
from lowtide._torch.optim import list_parameters
from lowtide._torch.tensors import find_parts, share_hooks
from lowtide.errors import RehearsalError
from lowtide.estimator import sparse_tensors as sparse
from lowtide.estimator.fake_tensors import FakeTensors, swap
from lowtide.estimator.packed_sequences import list_batch_sizes
from lowtide.runtime.batch_tensors import collect_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.values.value_oracle import ValueOracle


class GpuPlacement:
    """Context manager that turns the tensors given to `put` into fake tensors on the device of `fakes`.

    `is_there` returns True if a real tensor is on a GPU already. If a tensor that is not is a slice of larger memory,
    only its own elements are moved, unless it is a parameter. With `releases`, a tensor's memory on the GPU is freed
    when no other object refers to the tensor. All tensors become real again at the end of the block.
    """

    def __init__(
        self, fakes: FakeTensors, answers: ValueOracle, is_there: Callable[[Tensor], bool], *, releases: bool = False
    ) -> None:
        self._fake_tensors, self._answers, self._is_there, self._releases = fakes, answers, is_there, releases
        self._done: list[tuple[Callable[[], Tensor | None], Tensor]] = []

    @property
    def fake_of(self) -> Callable[[Tensor], Tensor]:
        """Function that returns the fake counterpart of a tensor that is no wrapper such as DTensor."""
        return self._fake_tensors.of

    def has(self, tensor: Tensor) -> bool:
        """Return True if `put` has moved this tensor."""
        return any(tensor is placed() for placed, _ in self._done)

    def put(self, tensors: Iterable[Tensor], resized: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Turn tensors that a step may use unchanged (`is_given`), and their gradients, into fake leaves.

        Raises RehearsalError for tensors whose contents torch can't exchange.
        """
        done = {id(placed()) for placed, _ in self._done}
        for tensor in {id(t): t for t in tensors}.values():
            if id(tensor) in done or is_fake(tensor) or not is_given(tensor):
                continue
            if sparse.is_compressed(tensor):
                raise RehearsalError(
                    f"a tensor of layout {tensor.layout} can't be estimated on a GPU: its fake tensors have no "
                    "elements.\n  "
                    "Convert it to COO (`tensor.to_sparse_coo()`)."
                )
            shown = resized(tensor)
            fake = self._make_fake(shown)
            if isinstance(tensor, nn.Parameter):
                make_parameter(fake, tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
            share_hooks(tensor, fake)
            if tensor.is_leaf and tensor.grad is not None:
                fake.grad = self._make_fake(tensor.grad)
            swap(tensor, fake)
            real = fake if shown is tensor else shown  # the two were exchanged
            self._done.append((self._reference(tensor, real), fake))

    def _make_fake(self, tensor: Tensor) -> Tensor:
        """Return the fake counterpart of a tensor. That of a distributed tensor wraps its fake local shard."""
        if is_wrapping(type(tensor)):
            with torch.no_grad():
                fake: Tensor = make_distributed_like(tensor, self._fake_tensors.of(next(find_parts(tensor))))
            return fake
        fake = self._fake_tensors.separate(tensor) if self._is_slice(tensor) else self._fake_tensors.of(tensor)
        self._answers.introduce(fake, tensor)
        return fake

    def _reference(self, tensor: Tensor, real: Tensor) -> Callable[[], Tensor | None]:
        if not self._releases:
            return lambda: tensor
        return weakref.ref(tensor, lambda _: self._fake_tensors.release(real))

    def _is_slice(self, tensor: Tensor) -> bool:
        is_piece = is_strided(tensor) and tensor.nbytes < tensor.untyped_storage().nbytes()
        return is_piece and not isinstance(tensor, nn.Parameter) and not self._is_there(tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # frames of a failed step hold graphs, which hold parameters
        for placed, fake in reversed(self._done):
            if (tensor := placed()) is not None:
                tensor.grad = None
                swap(tensor, fake)
        self._done.clear()


def belongings(model: nn.Module, batch: Any, reached: Iterable[Any]) -> list[Tensor]:
    """Return the tensors on the GPU when a step begins, in the order in which a script moves them there.

    The order is: the model; other modules, parameters and optimizer state that the step reaches; other tensors that it
    trains; the batch.
    """
    tensors: list[Tensor] = []
    _append_module_tensors(model, tensors)
    optimizers = []
    for obj in reached:
        if isinstance(obj, nn.Module):
            _append_module_tensors(obj, tensors)
        elif isinstance(obj, torch.optim.Optimizer):
            optimizers.append(obj)
    for optimizer in optimizers:
        tensors += list_parameters(optimizer)  # some are in no module
        tensors += _list_state(optimizer)
    tensors += (t for t in reached if isinstance(t, torch.Tensor) and t.requires_grad and is_given(t))
    sizes = {id(tensor) for tensor in list_batch_sizes(batch)}
    return tensors + [tensor for tensor in collect_tensors(batch) if id(tensor) not in sizes]


def is_given(tensor: Tensor) -> bool:
    """Return True if a step may use a tensor unchanged: a leaf, or a tensor that no parameter was used to compute.

    An example of the second kind are the points at which a physics-informed network takes derivatives.
    """
    return tensor.is_leaf or not any(
        isinstance(getattr(node, "variable", None), nn.Parameter) for node in find_nodes_behind([tensor])
    )


def _append_module_tensors(module: nn.Module, tensors: list[Tensor]) -> None:
    """Append a module's tensors to `tensors` in the order of `module.cuda()`: first the tensors of its children."""
    for child in module.children():
        _append_module_tensors(child, tensors)
    tensors += [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]


def _list_state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the optimizer's state on the GPU, including step counters if it is fused or capturable."""
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for entry in optimizer.state.values():
        for name, tensor in entry.items() if isinstance(entry, dict) else ():
            if isinstance(tensor, torch.Tensor) and (name != "step" or on_device):
                yield tensor
