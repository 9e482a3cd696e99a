"""Snapshot of everything that a step may change, so that a step can be run any number of times without a trace."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.device_timing import accelerator_in_use
from lowtide._torch.patching import this_thread_only
from lowtide._torch.tensors import find_parts, is_leaf_tensor, is_plain
from lowtide.memory.entry_storages import exclude_from_entry
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.host_rng import read_numpy_state, read_python_state, set_numpy_state
from lowtide.runtime.inplace_gradients import InPlacePermission
from lowtide.runtime.live_optimizers import Optimizers, list_optimizer_state, listed
from lowtide.runtime.offload import bytes_of
from lowtide.state.bitwise import has_same_contents
from lowtide.state.containers import make_container_restorer
from lowtide.state.process_group import NoSync
from lowtide.state.reachable_objects import ReachableObjects
from lowtide.state.reachable_state import states
from lowtide.utils.interrupts import uninterrupted, uninterrupted_enter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class StepSnapshot:
    """Snapshot of parameters, gradients, buffers, optimizer state, batch and RNG states, taken when `with` begins.

    It also covers the objects that the step reaches (`reachable_objects.py`): other modules, tensors, schedulers,
    gradient scalers, and numbers, strings and containers of its own. Other changes are described in `changes`.

    `restore()` can be called any number of times inside the block; the end of the block restores too, whatever
    happened. Copies live in host memory. Optimizers need not be named: an optimizer that steps inside the block is
    recorded before its step. Identity is kept as well: parameters, their `.grad` and buffers are the same objects
    afterwards. Until the block ends no other process of the training takes part (`process_group.py`), and no plan of
    another model writes gradients in place.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        optimizer: Optimizers = None,
        step: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._stepped: dict[int, Optimizer] = {}
        self._optimizers: dict[int, list[_TensorContents]] = {}
        """For each optimizer that has stepped, by id, the contents of its tensors before that."""
        self.changes: tuple[str, ...] = ()
        """Descriptions of changes that were not put back; filled when the block ends."""
        self._named = optimizer
        self._step = step

    @uninterrupted_enter
    def __enter__(self) -> Self:
        self._in_place = InPlacePermission(find_device(self._model).type, alone=True)
        try:
            return self._take()
        except BaseException:
            self._in_place.remove()
            raise

    def _take(self) -> Self:
        self._reachable = kept = ReachableObjects(self._step, self._model, self._batch)
        modules = list({id(m): m for root in (self._model, *kept.modules) for m in root.modules()}.values())
        self.modules = tuple(modules)
        """The model's modules, and all others that the step's code refers to."""
        self._restore_containers = make_container_restorer(self._batch)
        parameters = [p for m in modules for p in m._parameters.values() if p is not None and not p.is_meta]
        content = _unique([*parameters, *collect_tensors(self._batch)])
        buffers = [
            buffer
            for module in modules
            if not any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self._known = {id(tensor) for tensor in (*content, *buffers)}
        self._tensors = [*map(_TensorContents, _unique([*content, *buffers])), *self._copy_unowned(parameters)]
        leaves = [t for t in _unique([*content, *kept.tensors]) if is_leaf_tensor(t) and not t.is_inference()]
        self._gradients = [_TensorContents(exclude_from_entry(leaf.grad)) for leaf in leaves if leaf.grad is not None]
        self._states = states(kept.stateful)
        self._random = self._own_random = RandomState.now(kept.generators)
        for optimizer in listed(self._named):
            self._record_optimizer(optimizer)
        self._n_updates = 0
        self._no_sync = NoSync(modules)
        self._hook: RemovableHandle = register_optimizer_step_pre_hook(
            this_thread_only(self._before_update, self._is_known)
        )
        try:
            self._set_scales_to_one()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _copy_unowned(self, parameters: list[nn.Parameter]) -> list[_TensorContents | _Storage]:
        """Return copies of the tensors that no module owns; tensors that share a storage share its copy.

        Tensors shaped like a parameter, such as averages of weights, are copied; other tensors only within the limit on
        copied bytes. Changes to tensors that are not copied are reported by name.
        """
        states = {*map(id, list_optimizer_state(self._reachable.reached_optimizers))}
        shapes = {parameter.shape for parameter in parameters} | {torch.Size([sum(p.numel() for p in parameters)])}
        copied: list[_TensorContents | _Storage] = []
        seen: set[int] = set()
        for tensor in self._reachable.tensors:
            if id(tensor) in self._known or id(tensor) in states:  # an optimizer's tensors are copied when it steps
                continue
            self._known.add(id(tensor))
            storages = [part.untyped_storage() for part in find_parts(tensor)]
            n_bytes = sum(storage.nbytes() for storage in storages)
            if is_plain(tensor) and (tensor.shape in shapes or self._reachable.reserve_bytes(n_bytes)):
                copied.append(_Storage(tensor, is_first=storages[0].data_ptr() not in seen))
                seen.add(storages[0].data_ptr())
            elif self._reachable.reserve_bytes(n_bytes):
                copied.append(_TensorContents(tensor))
            else:
                self._reachable.watch(tensor)
        return copied

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Return every optimizer that has stepped."""
        return tuple(self._stepped.values())

    @property
    def scales(self) -> bool:
        """Return True if a gradient scaler is in use."""
        return any(state.scales for state in self._states)

    @property
    def overflows(self) -> bool:
        """Return True if a gradient scaler is in use and no optimizer has stepped so far, as when gradients
        overflow.
        """
        return not self._n_updates and self.scales

    @uninterrupted
    def restore(self, *, empties_caches: bool = False) -> None:
        """Restore everything for the next step.

        With `empties_caches`, the function caches that were empty before the first step are emptied too, so that the
        next step draws the random numbers that the first one put into them.
        """
        self._restore_all()
        if empties_caches:
            self._reachable.empty_caches()
        self._set_scales_to_one()

    def _set_scales_to_one(self) -> None:
        for state in self._states:
            state.set_scale_to_one()

    def _restore_all(self) -> None:
        self._no_sync.forget_step()
        self._reachable.restore()
        self._restore_containers()
        with torch.no_grad():
            for content in (*self._tensors, *self._gradients):
                content.restore()
            for contents in self._optimizers.values():
                for content in contents:
                    content.restore()
        for state in self._states:  # restored last, after the tensors that it contains
            state.restore()
        self._random.restore()

    def counts(self) -> dict[str, str]:
        """Return the changed whole numbers and strings, as text, by object number and name, such as "3 epoch"."""
        return self._reachable.counts()

    def restore_for_rerun(self) -> None:
        """Restore only the random number generators: the next step draws the same numbers as the first one."""
        self._random.restore()

    def seed(self, seed: int | None) -> None:
        """Seed the RNG states with which later steps begin; with None, use the states from when the block began."""
        self._random = self._own_random if seed is None else self._own_random.seeded(seed, self._reachable.generators)

    def restore_contents(self, tensors: set[int]) -> None:
        """Restore only the contents of the tensors with these ids."""
        with torch.no_grad():
            for content in (*self._tensors, *(c for contents in self._optimizers.values() for c in contents)):
                if id(content.tensor) in tensors:
                    content.restore()

    def run(self, batch: Any) -> Any:
        """Run one step on `batch`, then restore the containers in the batch; return the step's result."""
        assert self._step is not None
        try:
            return self._step(batch)
        finally:
            self._restore_containers()

    @uninterrupted
    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._random = self._own_random
        try:
            self._restore_all()
            self._reachable.empty_caches()
            self.changes = self._reachable.changes()
        finally:
            self._reachable.close()
            self._no_sync.end()
            self._in_place.remove()

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._n_updates += 1
        self._record_optimizer(optimizer)

    def _is_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def _record_optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepped:
            return
        self._stepped[id(optimizer)] = optimizer
        self._reachable.visit_late(optimizer)  # perhaps not reached from the step's objects; it has not stepped yet
        state_tensors = collect_tensors([*optimizer.param_groups, *optimizer.state.values()])
        self._optimizers[id(optimizer)] = [
            _TensorContents(t) for t in _unique(state_tensors) if id(t) not in self._known
        ]


class _TensorContents:
    """A tensor and a copy of its contents, which is written back only if the contents differ.

    A write adds a version, which would invalidate graphs that hold the tensor. The contents are compared, not the
    versions, because batch norm writes its statistics without a new version.
    """

    __slots__ = ("saved", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.saved = exclude_from_entry(_view_each_byte_once(tensor).to("cpu", copy=True))

    def restore(self) -> None:
        current = _view_each_byte_once(self.tensor)
        if not all(map(has_same_contents, find_parts(current.cpu()), find_parts(self.saved))):
            # A sparse tensor gets new parts, which an alias that shares the old ones would not pass on.
            (current if self.tensor.layout is torch.strided else self.tensor).copy_(self.saved)


def _view_each_byte_once(tensor: Tensor) -> Tensor:
    """Return a view of `tensor` that has each element in memory once; torch can't write to results of `expand`."""
    tensor = tensor.detach()
    if not is_plain(tensor) or 0 in tensor.shape:
        return tensor
    tensor = tensor[tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())]
    reach = 1  # elements from the first one to the last of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return tensor.as_strided((_span(tensor),), (1,))
        reach += (size - 1) * stride
    return tensor


def _span(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last of `tensor` in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class _Storage:
    """A tensor that no module owns, and the contents of its storage, which other tensors may share."""

    __slots__ = ("_alias", "_saved", "tensor")

    def __init__(self, tensor: Tensor, *, is_first: bool) -> None:
        self.tensor, self._alias = tensor, tensor.detach()
        self._saved = exclude_from_entry(bytes_of(tensor).to("cpu", copy=True)) if is_first else None

    def restore(self) -> None:
        now, then = self.tensor, self._alias
        if now.data_ptr() != then.data_ptr() or now.shape != then.shape or now.stride() != then.stride():
            now.data = then
        if self._saved is None:
            return
        if (storage := then.untyped_storage()).nbytes() != len(self._saved):
            storage.resize_(len(self._saved))
        if not torch.equal((current := bytes_of(then)).cpu(), self._saved):
            current.copy_(self._saved)


@dataclass(frozen=True, slots=True)
class RandomState:
    """State of all random number generators that training code draws from."""

    torch_cpu: Tensor
    torch_gpus: dict[int, Tensor]
    python: tuple[Any, ...]
    numpy: Any
    others: tuple[tuple[Callable[[Any], object], Any], ...] = ()
    """For each user-made generator, the function that sets its state, and the state."""

    @classmethod
    def now(cls, others: Iterable[Any] = ()) -> RandomState:
        """Return the current state; `others` are generators of torch, NumPy or Python."""
        gpus = range(torch.accelerator.device_count()) if accelerator_in_use() else ()
        return cls(
            torch_cpu=exclude_from_entry(torch.get_rng_state()),
            torch_gpus={gpu: exclude_from_entry(torch.get_device_module().get_rng_state(gpu)) for gpu in gpus},
            python=read_python_state(),
            numpy=read_numpy_state(),
            others=tuple(map(state_of, others)),
        )

    def seeded(self, seed: int, others: Iterable[Any] = ()) -> RandomState:
        """Return the state after seeding torch on the CPU, Python, NumPy's default kind of generator and `others`."""
        numpy = self.numpy
        if isinstance(np.random.get_bit_generator(), np.random.MT19937):  # type: ignore[attr-defined]
            numpy = np.random.RandomState(seed).get_state()
        return replace(
            self,
            torch_cpu=torch.Generator().manual_seed(seed).get_state(),
            python=random.Random(seed).getstate(),
            numpy=numpy,
            others=tuple(map(partial(make_seeded_state, seed), others)),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        for gpu, state in self.torch_gpus.items():
            torch.get_device_module().set_rng_state(state, gpu)
        random.setstate(self.python)
        set_numpy_state(self.numpy)
        for set_state, state in self.others:
            set_state(state)


def state_of(generator: Any) -> tuple[Callable[[Any], object], Any]:
    """Return the function that sets the state of a generator of torch, NumPy or Python, and the state."""
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits: Any = getattr(generator, "bit_generator", generator)
        return partial(setattr, bits, "state"), bits.state
    return generator.set_state, generator.get_state()


def make_seeded_state(seed: int, generator: Any) -> tuple[Callable[[Any], object], Any]:
    """Return the function that sets the state of a generator, and its state after seeding."""
    set_state, state = state_of(generator)
    if isinstance(generator, random.Random):
        state = random.Random(seed).getstate()
    elif isinstance(generator, np.random.Generator | np.random.BitGenerator):
        bits: Any = getattr(generator, "bit_generator", generator)
        state = type(bits)(seed).state
    elif isinstance(generator, torch.Generator):
        state = torch.Generator(generator.device).manual_seed(seed).get_state()
    return set_state, state


def _unique(items: list[Any]) -> list[Tensor]:
    tensors = (item for item in items if isinstance(item, torch.Tensor))
    return list({id(tensor): tensor for tensor in tensors}.values())
