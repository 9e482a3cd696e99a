"""A module call that is run again when backward first needs what it saved.

For what has no recipe: decomposed activations, custom functions, random masks; and for the insides of whole blocks. The
second run sees exactly what the first one saw (arguments, random numbers, autocast, training flags, buffers) and leaves
no trace: buffers and generators are afterwards as they were. It stops as soon as the last tensor that somebody waits for
is there, so the products at a block's end are never redone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowtide.remat import values
from lowtide.remat.values import Handle, Value

if TYPE_CHECKING:
    from torch import Tensor, nn


class ReplayMismatch(RuntimeError):
    """The second run of a module call did not save what the first one did."""


class _Enough(BaseException):
    """Stops a replay. Not an Exception, so that no `except Exception` in a model catches it."""


class Surroundings:
    """What a module call sees besides its arguments, taken when it begins."""

    __slots__ = ("autocast", "buffers", "modules", "rng", "training")

    def __init__(self, modules: tuple[nn.Module, ...], buffers: tuple[tuple[nn.Module, str], ...], device: str) -> None:
        self.modules = modules
        self.rng = _rng_state(device)
        self.autocast = _autocast_state(device)
        self.training = tuple(module.training for module in modules)
        self.buffers = tuple(_Buffer(module, name) for module, name in buffers)

    def written(self) -> Iterator[tuple[nn.Module, str]]:
        """The buffers that were written to since."""
        return ((buffer.module, buffer.name) for buffer in self.buffers if buffer.written())

    @contextlib.contextmanager
    def again(self, device: str) -> Iterator[None]:
        """Everything as it was when the call began; afterwards as it was before."""
        now_rng, now_training = _rng_state(device), tuple(module.training for module in self.modules)
        now_buffers = [buffer.module._buffers[buffer.name] for buffer in self.buffers]
        kind, enabled, dtype, cache = self.autocast
        try:
            _set_rng_state(self.rng)
            for module, flag in zip(self.modules, self.training, strict=True):
                module.training = flag
            for buffer in self.buffers:
                buffer.module._buffers[buffer.name] = buffer.content.clone()
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache):
                yield
        finally:
            for buffer, now in zip(self.buffers, now_buffers, strict=True):
                buffer.module._buffers[buffer.name] = now
            for module, flag in zip(self.modules, now_training, strict=True):
                module.training = flag
            _set_rng_state(now_rng)


class _Buffer:
    """A buffer of a module and what was in it."""

    __slots__ = ("content", "module", "name", "there", "version")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.there = module._buffers[name]
        assert self.there is not None
        self.version, self.content = self.there._version, self.there.clone()

    def written(self) -> bool:
        now = self.module._buffers[self.name]
        return now is not self.there or now._version != self.version


class Frame:
    """One call of a replayed module: what it was given, and the values that it can bring back."""

    __slots__ = ("__weakref__", "arguments", "count", "device", "done", "grads", "run", "spec", "surroundings", "values")

    def __init__(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hold: Callable[[Tensor], Handle],
        surroundings: Surroundings,
        device: str,
    ) -> None:
        leaves, self.spec = flatten(args, kwargs)
        self.run = run
        self.device = device
        self.surroundings = surroundings
        self.grads = tuple(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)
        self.arguments = [hold(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.count = 0
        """Tensors packed since the call began."""
        self.values: dict[int, weakref.ref[Value]] = {}
        """What a replay brings back, by its place among the packed tensors."""

    def value(self, place: int) -> Value:
        """The value of the tensor packed at `place`."""
        value = Value(maker=self)
        self.values[place] = weakref.ref(value)
        return value

    def make(self, value: Value) -> Tensor:
        """Run the call again; every value that somebody waits for is there afterwards."""
        if values.probe is not None:
            values.probe.making(self)
        found = self.catch()
        if values.probe is not None:
            values.probe.made(self, tuple(found.values()))
        for place, tensor in found.items():
            there = self.values[place]()
            if there is value:
                result = tensor
            if there is not None:
                there.arrive(tensor)
        return result

    def catch(self) -> dict[int, Tensor]:
        """What the call saves when it is run again, detached, for each place that somebody still holds."""
        wanted = {place for place, reference in self.values.items() if reference() is not None}
        last = max(wanted)
        found: dict[int, Tensor] = {}
        places = iter(range(last + 1))

        def pack(tensor: Tensor) -> None:
            place = next(places)
            if place in wanted:
                base = tensor._base
                found[place] = (tensor if base is None or base.dtype != tensor.dtype else base).detach()
            if place == last:
                raise _Enough

        with saved_tensors_hooks(pack, _never), self.surroundings.again(self.device):  # type: ignore[arg-type]
            args, kwargs = self._arguments()
            with contextlib.suppress(_Enough):
                self.run(*args, **kwargs)
        if len(found) < len(wanted):
            raise ReplayMismatch(
                f"{_name(self.run)} saved {next(places)} tensors when it was run again, and at least {last + 1} before. "
                "It depends on something besides its arguments, random numbers, buffers and flags: exclude it from replays."
            )
        return found

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [
            leaf.get().detach().requires_grad_(grad) if isinstance(leaf, Handle) else leaf
            for leaf, grad in zip(self.arguments, self.grads, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """The leaves of a call's arguments, through lists, tuples, dicts and whatever is registered with torch's pytrees."""
    return tree_flatten((args, kwargs))


def all_buffers(modules: tuple[nn.Module, ...]) -> tuple[tuple[nn.Module, str], ...]:
    """Every buffer of `modules`: any of them may be written to, until a call has shown which are."""
    return tuple((module, name) for module in modules for name, buffer in module._buffers.items() if buffer is not None)


def _never(packed: Any) -> Tensor:
    raise AssertionError("the graph of a replay is never run backwards")


def _name(run: Callable[..., Any]) -> str:
    owner = getattr(run, "__self__", None)
    return type(owner).__name__ if owner is not None else repr(run)


def _rng_state(device: str) -> tuple[Tensor, Tensor | None]:
    on_card = device != "cpu" and torch.accelerator.is_available()
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state() if on_card else None


def _set_rng_state(state: tuple[Tensor, Tensor | None]) -> None:
    cpu, card = state
    torch.set_rng_state(cpu)
    if card is not None:
        torch.get_device_module().set_rng_state(card)


def _autocast_state(device: str) -> tuple[str, bool, torch.dtype, bool]:
    return (
        device,
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )
