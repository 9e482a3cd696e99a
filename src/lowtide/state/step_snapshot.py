"""A step can be run as often as needed and nothing remembers: everything it may change is put back as it was."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.device_timing import accelerator_in_use
from lowtide._torch.patching import this_thread_only
from lowtide._torch.tensors import is_leaf_tensor, is_plain, parts_of
from lowtide.memory.entry_storages import set_aside
from lowtide.runtime.fingerprint import Optimizers, listed, place_of, tensors_in
from lowtide.runtime.host_rng import numpy_state, python_state, set_numpy_state
from lowtide.runtime.inplace_gradients import InPlace
from lowtide.state.bitwise import identical
from lowtide.state.containers import handing_back
from lowtide.state.process_group import NoSync
from lowtide.state.reachable_objects import ReachableObjects
from lowtide.state.reachable_state import states
from lowtide.utils.interrupts import entering, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class StepSnapshot:
    """Parameters, gradients, buffers, optimizer state, batch and random numbers as they were at `with`.

    And what the step reaches (`reachable_objects.py`): other modules, tensors, schedulers, gradient scalers, and
    numbers, words and containers of its own. What else has changed is named in `changes`.

    Usable several times over inside the block with `restore()`; the end of the block restores too, whatever happened.
    Copies live in host memory. Optimizers need not be named: one that steps inside the block is noticed before it does.
    Identity is kept as well: parameters, their `.grad` and buffers are the same objects afterwards. No other process of
    the training takes part meanwhile (`process_group.py`), and no plan of another model writes gradients in place.
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
        """Of each optimizer that has stepped what was in its tensors before."""
        self.changes: tuple[str, ...] = ()
        """Once the block has ended, what has changed in it and was not put back, in words."""
        self._named = optimizer
        self._step = step

    @entering
    def __enter__(self) -> Self:
        self._in_place = InPlace(place_of(self._model).type, alone=True)
        try:
            return self._entered()
        except BaseException:
            self._in_place.remove()
            raise

    def _entered(self) -> Self:
        self._kept = kept = ReachableObjects(self._step, self._model, self._batch)
        modules = list({id(m): m for root in (self._model, *kept.modules) for m in root.modules()}.values())
        self.modules = tuple(modules)
        """The model's and all others that the step's code refers to."""
        self._hand_back = handing_back(self._batch)
        parameters = [p for m in modules for p in m._parameters.values() if p is not None and not p.is_meta]
        content = _unique([*parameters, *tensors_in(self._batch)])
        buffers = [
            buffer
            for module in modules
            if not any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        self._known = {id(tensor) for tensor in (*content, *buffers)}
        self._tensors = [*map(_TensorContents, _unique([*content, *buffers])), *self._copied(parameters)]
        leaves = [t for t in _unique([*content, *kept.tensors]) if is_leaf_tensor(t) and not t.is_inference()]
        self._gradients = [_TensorContents(set_aside(leaf.grad)) for leaf in leaves if leaf.grad is not None]
        self._states = states(kept.stateful)
        self._random = self._own_random = RandomState.now(kept.generators)
        for optimizer in listed(self._named):
            self._noticed(optimizer)
        self._n_updates = 0
        self._alone = NoSync(modules)
        self._hook: RemovableHandle = register_optimizer_step_pre_hook(this_thread_only(self._steps, self._has))
        try:
            self._synchronize()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _copied(self, parameters: list[nn.Parameter]) -> list[_TensorContents | _Storage]:
        """Copies of tensors that no module owns, each storage once: those shaped as a parameter, as averages of weights
        are, and others as long as they are not too many bytes. Of what is not copied changes are named.
        """
        states = {id(t) for o in self._kept.reached_optimizers for entry in o.state.values() for t in tensors_in(entry)}
        shapes = {parameter.shape for parameter in parameters} | {torch.Size([sum(p.numel() for p in parameters)])}
        copied: list[_TensorContents | _Storage] = []
        seen: set[int] = set()
        for tensor in self._kept.tensors:
            if id(tensor) in self._known or id(tensor) in states:  # an optimizer's are copied when it steps
                continue
            self._known.add(id(tensor))
            storage = tensor.untyped_storage()
            if is_plain(tensor) and (tensor.shape in shapes or self._kept.take(storage.nbytes())):
                copied.append(_Storage(tensor, is_first=storage.data_ptr() not in seen))
                seen.add(storage.data_ptr())
            elif self._kept.take(tensor.nbytes):
                copied.append(_TensorContents(tensor))
            else:
                self._kept.watch(tensor)
        return copied

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Every optimizer that has stepped."""
        return tuple(self._stepped.values())

    @property
    def scales(self) -> bool:
        """Whether there is a gradient scaler in use."""
        return any(state.scales for state in self._states)

    @property
    def overflows(self) -> bool:
        """Whether there is a gradient scaler, and no optimizer has stepped so far."""
        return not self._n_updates and self.scales

    @whole
    def restore(self) -> None:
        """Put everything back, for the next step."""
        self._put_back()
        self._synchronize()

    def _synchronize(self) -> None:
        for state in self._states:
            state.calm()

    def _put_back(self) -> None:
        self._alone.forget_step()
        self._kept.restore()
        self._hand_back()
        with torch.no_grad():
            for content in (*self._tensors, *self._gradients):
                content.restore()
            for contents in self._optimizers.values():
                for content in contents:
                    content.restore()
        for state in self._states:  # last: what its tensors were has been put back by now
            state.restore()
        self._random.restore()

    def counts(self) -> dict[str, str]:
        """Whole numbers and words that Python holds and that are other ones by now, each with its place."""
        return self._kept.counts()

    def restore_for_rerun(self) -> None:
        """Only the random numbers: the next step draws what the first one drew."""
        self._random.restore()

    def seed(self, seed: int | None) -> None:
        """From now on steps begin with generators that are seeded so; None: as they were at `with`."""
        self._random = self._own_random if seed is None else self._own_random.seeded(seed, self._kept.generators)

    def put_back(self, tensors: set[int]) -> None:
        """Only what was in these tensors, by their ids."""
        with torch.no_grad():
            for content in (*self._tensors, *(c for contents in self._optimizers.values() for c in contents)):
                if id(content.tensor) in tensors:
                    content.restore()

    def run(self, batch: Any) -> Any:
        """One step, after which the batch holds what it held."""
        assert self._step is not None
        try:
            return self._step(batch)
        finally:
            self._hand_back()

    @whole
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        self._random = self._own_random
        try:
            self._put_back()
            self.changes = self._kept.changes()
        finally:
            self._kept.close()
            self._alone.end()
            self._in_place.remove()

    def _steps(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._n_updates += 1
        self._noticed(optimizer)

    def _has(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def _noticed(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._stepped:
            return
        self._stepped[id(optimizer)] = optimizer
        self._kept.note_late(optimizer)  # if nothing reached it: it has not stepped yet
        mine = tensors_in([*optimizer.param_groups, *optimizer.state.values()])
        self._optimizers[id(optimizer)] = [_TensorContents(t) for t in _unique(mine) if id(t) not in self._known]


class _TensorContents:
    """A tensor and what was in it. Written back only if it was written to: its version counts for graphs that hold it.

    The contents are compared, not the versions: batch norm writes its statistics without a new version.
    """

    __slots__ = ("saved", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.saved = set_aside(tensor.detach().to("cpu", copy=True))

    def restore(self) -> None:
        now = parts_of(self.tensor.detach().cpu())
        if not all(map(identical, now, parts_of(self.saved))):
            # A sparse tensor is given other parts, which one that shares the old ones would not pass on.
            (self.tensor.detach() if self.tensor.layout is torch.strided else self.tensor).copy_(self.saved)


class _Storage:
    """A tensor that no module owns, and what was in its storage: other tensors may have that, too."""

    __slots__ = ("_alias", "_saved", "tensor")

    def __init__(self, tensor: Tensor, *, is_first: bool) -> None:
        self.tensor, self._alias = tensor, tensor.detach()
        self._saved = set_aside(_bytes_of(tensor).to("cpu", copy=True)) if is_first else None

    def restore(self) -> None:
        now, then = self.tensor, self._alias
        if now.data_ptr() != then.data_ptr() or now.shape != then.shape or now.stride() != then.stride():
            now.data = then
        if self._saved is not None and not torch.equal((there := _bytes_of(then)).cpu(), self._saved):
            there.copy_(self._saved)


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class RandomState:
    """All random number generators that training code draws from."""

    torch_cpu: Tensor
    torch_gpus: dict[int, Tensor]
    python: tuple[Any, ...]
    numpy: Any
    others: tuple[tuple[Callable[[Any], object], Any], ...] = ()
    """Of generators that somebody has made: how a state is set, and the state."""

    @classmethod
    def now(cls, others: Iterable[Any] = ()) -> RandomState:
        """By now; `others` are generators of torch, NumPy or Python."""
        gpus = range(torch.accelerator.device_count()) if accelerator_in_use() else ()
        return cls(
            torch_cpu=set_aside(torch.get_rng_state()),
            torch_gpus={gpu: set_aside(torch.get_device_module().get_rng_state(gpu)) for gpu in gpus},
            python=python_state(),
            numpy=numpy_state(),
            others=tuple(map(state_of, others)),
        )

    def seeded(self, seed: int, others: Iterable[Any] = ()) -> RandomState:
        """States after seeding torch on the CPU, Python, NumPy's own kind of generator and `others`."""
        numpy = self.numpy
        if isinstance(np.random.get_bit_generator(), np.random.MT19937):  # type: ignore[attr-defined]
            numpy = np.random.RandomState(seed).get_state()
        return replace(
            self,
            torch_cpu=torch.Generator().manual_seed(seed).get_state(),
            python=random.Random(seed).getstate(),
            numpy=numpy,
            others=tuple(map(partial(seeded_state_of, seed), others)),
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
    """How the state of a generator of torch, NumPy or Python is set, and what it is."""
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state"), bits.state
    return generator.set_state, generator.get_state()


def seeded_state_of(seed: int, generator: Any) -> tuple[Callable[[Any], object], Any]:
    """How the state of a generator is set, and the one after seeding."""
    set_state, state = state_of(generator)
    if isinstance(generator, random.Random):
        state = random.Random(seed).getstate()
    elif isinstance(generator, np.random.Generator):
        state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        state = torch.Generator(generator.device).manual_seed(seed).get_state()
    return set_state, state


def _unique(found: list[Any]) -> list[Tensor]:
    tensors = (item for item in found if isinstance(item, torch.Tensor))
    return list({id(tensor): tensor for tensor in tensors}.values())
