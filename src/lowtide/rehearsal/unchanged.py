"""A step can be run as often as needed and nothing remembers: everything it may change is put back as it was."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._clock import accelerator_in_use
from lowtide._interrupts import entering, whole
from lowtide._standins import of_this_thread
from lowtide._torch import is_plain, parts_of
from lowtide.identity import place_of, tensors_in
from lowtide.memory.entry import set_aside
from lowtide.rehearsal.bits import identical
from lowtide.rehearsal.containers import handing_back
from lowtide.rehearsal.processes import Alone
from lowtide.rehearsal.reached import Reached, has_graph, put_back, states
from lowtide.remat.draws import numpy_state, python_state, set_numpy_state
from lowtide.remat.in_place import InPlace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


class Unchanged:
    """Parameters, gradients, buffers, optimizer state, batch and random numbers as they were at `with`.

    And what the code of `step` refers to (`reached.py`): those of other modules, tensors, schedulers, gradient scalers.

    Usable several times over inside the block with `restore()`; the end of the block restores too, whatever happened.
    Copies live in host memory. Optimizers need not be named: one that steps inside the block is noticed before it does.
    Identity is kept as well: parameters, their `.grad` and buffers are the same objects afterwards. No other process of
    the training takes part meanwhile (`processes.py`), and no plan of another model writes gradients in place.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        optimizer: Optimizer | None = None,
        step: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model = model
        self._batch = batch
        self._optimizers: dict[int, _OptimizerState] = {}
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
        found = Reached(self._step, self._model)
        modules = list({id(m): m for root in (self._model, *found.modules) for m in root.modules()}.values())
        self.modules = tuple(modules)
        """The model's and all others that the step's code refers to."""
        parameters = [p for m in modules for p in m._parameters.values() if p is not None and not p.is_meta]
        given = tensors_in(self._batch)
        content = _unique([*parameters, *found.tensors, *given])
        leaves = [t for t in content if t.is_leaf and not t.is_inference()]
        buffers = {id(b) for module in modules for b in module._buffers.values()}
        self._tensors = [_Content(t) for t in content if id(t) not in buffers]
        self._known = {id(content.tensor) for content in self._tensors}
        self._gradients = [(p, None if p.grad is None else _Content(p.grad)) for p in leaves]
        self._required = [(t, t.requires_grad) for t in leaves if t.is_floating_point() or t.is_complex()]
        self._buffers = [
            (module, name, None if buffer is None else _Content(buffer))
            for module in modules
            if not any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())
            for name, buffer in module._buffers.items()
        ]
        self._bound = [_Bound(m) for m in modules if all(map(_is_there, m._parameters.values()))]
        self._attributes = [_Attributes(module) for module in modules]
        owned = {id(table) for module in modules for table in (module._parameters, module._buffers)}
        self._places = [place for place in found.places if id(place[0]) not in owned]
        self._hand_back = handing_back(self._batch)
        self._states = states(found.stateful)
        self._training = [(module, module.training) for module in modules]
        self._random = RandomState.now(found.generators)
        if self._named is not None:
            self._noticed(self._named)
        self._n_updates = 0
        self._alone = Alone(modules)
        self._hook: RemovableHandle = register_optimizer_step_pre_hook(of_this_thread(self._steps, self._has))
        try:
            self._calm()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """Every optimizer that has stepped."""
        return tuple(state.optimizer for state in self._optimizers.values())

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
        self._calm()

    def _calm(self) -> None:
        for state in self._states:
            state.calm()

    def _put_back(self) -> None:
        self._alone.forget_step()
        for container, key, tensor in self._places:
            put_back(container, key, tensor)
        self._hand_back()
        with torch.no_grad():
            for content in self._tensors:
                content.restore()
            for optimizer in self._optimizers.values():
                optimizer.restore()
            for parameter, gradient in self._gradients:
                parameter.grad = None if gradient is None else gradient.tensor
                if gradient is not None:
                    gradient.restore()
            for tensor, requires in self._required:
                if tensor.requires_grad != requires:
                    tensor.requires_grad_(requires)
            for bound in self._bound:
                bound.restore()
            for attributes in self._attributes:
                attributes.restore()
            for module, name, buffer in self._buffers:
                module._buffers[name] = None if buffer is None else buffer.tensor
                if buffer is not None:
                    buffer.restore()
        for state in self._states:  # last: what its tensors were has been put back by now
            state.restore()
        for module, training in self._training:
            module.training = training
        self._random.restore()

    def rewind(self) -> None:
        """Only the random numbers: the next step draws what the first one drew."""
        self._random.restore()

    def put_back(self, tensors: set[int]) -> None:
        """Only what was in these tensors, by their ids."""
        with torch.no_grad():
            for content in (*self._tensors, *(c for state in self._optimizers.values() for c in state.others)):
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
        try:
            self._put_back()
        finally:
            self._alone.end()
            self._in_place.remove()

    def _steps(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._n_updates += 1
        self._noticed(optimizer)

    def _has(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def _noticed(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = _OptimizerState(optimizer, self._known)


class _Content:
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


class _Bound:
    """Which parameters a module has, under which names; and which attributes that are None, as those to come may be."""

    __slots__ = ("missing", "module", "parameters")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.parameters = module, dict(module._parameters)
        self.missing = [name for name, found in vars(module).items() if found is None]

    def restore(self) -> None:
        table = self.module._parameters
        if [*map(id, table.values())] != [*map(id, self.parameters.values())]:
            table.clear()
            table.update(self.parameters)
            vars(self.module).update((name, None) for name in self.missing if name not in vars(self.module))


class _Attributes:
    """What the attributes of a module were that a step leaves a graph in, such as an auxiliary loss: with the graph it
    keeps memory, and a model that holds one can't be copied.
    """

    __slots__ = ("before", "module", "names")

    def __init__(self, module: nn.Module) -> None:
        found = vars(module)
        self.module, self.names = module, set(found)
        self.before = {name: content for name, content in found.items() if not has_graph(content)}

    def restore(self) -> None:
        found = vars(self.module)
        for name in [name for name, content in found.items() if has_graph(content)]:
            if name in self.before:
                found[name] = self.before[name]
            elif name not in self.names:
                del found[name]


class _OptimizerState:
    """An optimizer before its first step in the block, and the parameters it has of other models."""

    def __init__(self, optimizer: Optimizer, known: set[int]) -> None:
        self.optimizer = optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.others = [_Content(p) for p in parameters if id(p) not in known]
        self.settings = [{k: _noted(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self.state = {parameter: _noted(state) for parameter, state in optimizer.state.items()}

    def restore(self) -> None:
        for content in self.others:
            content.restore()
        for group, settings in zip(self.optimizer.param_groups, self.settings, strict=True):
            group.update(_given_back(settings))
        state = self.optimizer.state
        for parameter in [p for p in state if p not in self.state]:
            del state[parameter]
        for parameter, saved in self.state.items():
            state[parameter] = _given_back(saved)


def _noted(value: Any) -> Any:
    """Dicts and lists with the contents of the tensors in them: L-BFGS appends to lists."""
    if isinstance(value, torch.Tensor):
        return _Content(value)
    if type(value) is dict:
        return {key: _noted(entry) for key, entry in value.items()}
    return [_noted(entry) for entry in value] if type(value) is list else value


def _given_back(noted: Any) -> Any:
    if isinstance(noted, _Content):
        noted.restore()
        return noted.tensor
    if type(noted) is dict:
        return {key: _given_back(entry) for key, entry in noted.items()}
    return [_given_back(entry) for entry in noted] if type(noted) is list else noted


@dataclass(frozen=True, slots=True)
class RandomState:
    """All random number generators that training code draws from."""

    torch_cpu: Tensor
    torch_cards: dict[int, Tensor]
    python: tuple[Any, ...]
    numpy: Any
    others: tuple[tuple[Callable[[Any], object], Any], ...] = ()
    """Of generators that somebody has made: how a state is set, and the state."""

    @classmethod
    def now(cls, others: Iterable[Any] = ()) -> RandomState:
        """By now; `others` are generators of torch, NumPy or Python."""
        cards = range(torch.accelerator.device_count()) if accelerator_in_use() else ()
        return cls(
            torch_cpu=set_aside(torch.get_rng_state()),
            torch_cards={card: set_aside(torch.get_device_module().get_rng_state(card)) for card in cards},
            python=python_state(),
            numpy=numpy_state(),
            others=tuple(map(state_of, others)),
        )

    def restore(self) -> None:
        torch.set_rng_state(self.torch_cpu)
        for card, state in self.torch_cards.items():
            torch.get_device_module().set_rng_state(state, card)
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


def _is_there(parameter: nn.Parameter | None) -> bool:
    """Whether a parameter is one that a step leaves where it is: not one to be made yet, nor sharded."""
    return parameter is None or (not parameter.is_meta and is_plain(parameter))


def _unique(found: list[Any]) -> list[Tensor]:
    tensors = (item for item in found if isinstance(item, torch.Tensor))
    return list({id(tensor): tensor for tensor in tensors}.values())
