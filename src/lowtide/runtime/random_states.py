"""States of all random number generators that a module call may draw from, as they were when the call began."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lowtide.runtime import host_rng

if TYPE_CHECKING:
    from torch import Tensor


class RandomStates:
    """States of torch's generators on the CPU and on GPUs, of generators passed to a call, of Python and of NumPy."""

    __slots__ = ("_cpu", "_generators", "_gpus", "_host_memory", "_numpy", "_python")

    def __init__(self, gpus: Collection[torch.device], generators: Collection[torch.Generator]) -> None:
        """Capture the present states: of the CPU's generator, `gpus`, `generators`, Python and NumPy."""
        self._cpu = torch.default_generator.get_state()
        self._gpus = [(gpu, torch.get_device_module(gpu).get_rng_state(gpu)) for gpu in gpus] if gpus else []
        self._generators = [(g, g.get_state()) for g in generators] if generators else []
        self._python: tuple[Any, ...] | None
        self._host_memory, self._python, self._numpy = host_rng.states()

    def end_call(self) -> None:
        """Forget the states of Python and NumPy if the call, which has ended, has drawn nothing from them.

        Each call is checked anew, because a call that draws nothing may draw the next time.
        """
        memory, self._host_memory = self._host_memory, None
        if memory is not None and host_rng.memory() == memory:
            self._python = self._numpy = None
            return
        if host_rng.read_python_state() is self._python:
            self._python = None
        if host_rng.read_numpy_state() is self._numpy:
            self._numpy = None

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Yield the states that are tensors."""
        yield self._cpu
        yield from (state for _, state in (*self._gpus, *self._generators))

    def restore(self, undo: list[Callable[[], object]]) -> None:
        """Set all generators to these states; add functions that bring back the present states to `undo`."""
        own = torch.default_generator  # torch.set_rng_state without calls of Python functions
        undo.append(partial(own.set_state, own.get_state()))
        own.set_state(self._cpu)
        for gpu, state in self._gpus:
            device = torch.get_device_module(gpu)
            undo.append(partial(device.set_rng_state, device.get_rng_state(gpu), gpu))
            device.set_rng_state(state, gpu)
        for generator, state in self._generators:
            undo.append(partial(generator.set_state, generator.get_state()))
            generator.set_state(state)
        if self._python is not None:
            undo.append(partial(random.setstate, host_rng.read_python_state()))
            random.setstate(self._python)
        if self._numpy is not None:
            undo.append(partial(host_rng.set_numpy_state, host_rng.read_numpy_state()))
            host_rng.set_numpy_state(self._numpy)


def with_generators(devices: Iterable[torch.device]) -> frozenset[torch.device]:
    """Return the devices, other than the CPU, that have random number generators."""
    return frozenset(device for device in devices if device.type not in ("cpu", "meta"))
