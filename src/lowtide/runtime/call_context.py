"""State besides its arguments that a module call reads, captured when it begins and restored around a replay.

Random numbers (torch on the CPU and on the module's GPUs, generators passed to it, Python, NumPy), autocast, the
kernels that attention may use, training flags, buffers and plain attributes are restored; after the replay they return
to their state before it. Parameters, and buffers that the call does not write to, are not copied: a replay that finds
other contents in them is refused.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.fake_modes import bytes_of, is_fake
from lowtide._torch.modes import ATTENTION_KERNELS
from lowtide._torch.pytree import tree_leaves
from lowtide._torch.tensors import as_kind, is_plain, storage_id
from lowtide.runtime.fsdp_scopes import units
from lowtide.runtime.host_rng import numpy_state, python_state, set_numpy_state
from lowtide.runtime.module_attributes import Attributes
from lowtide.runtime.tensor_writers import Overwritten

if TYPE_CHECKING:
    from torch import Tensor, nn

SMALL_BYTES = 2**16
"""Largest size in bytes of a buffer that is copied for every call, because batch norm writes to its buffers without a
new version.
"""

LARGEST_SUMMED = 2**20
"""Largest size in bytes of a buffer on the CPU for which writes to its `.data` are detected."""


class MutableState:
    """State that calls of one module can change, and the part of it that the first call did change."""

    __slots__ = ("generators", "gpus", "holds", "is_overwritten", "modules", "units", "written")

    def __init__(self, module: nn.Module) -> None:
        self.modules = tuple(module.modules())
        self.units = tuple(units(self.modules))
        """Modules whose parameters are different tensors while they run."""
        self.gpus = gpus(tensor.device for tensor in (*module.parameters(), *module.buffers()))
        attributes = (item for part in self.modules for item in vars(part).values())
        self.generators = tuple(item for item in attributes if isinstance(item, torch.Generator))
        self.written: frozenset[tuple[nn.Module, str]] | None = None
        """Large buffers that a call writes to; None until one call has been observed."""
        self.holds = False
        """True if a call runs backward inside its forward: a replay must hold the tensors it saves for that."""
        self.is_overwritten = False
        """True once a tensor that a call had read was written to before backward: no call is run again from then on."""

    def forget(self) -> None:
        """Forget the written buffers, so that the next call is observed again."""
        self.written = None


class CallContext:
    """State that one call reads."""

    __slots__ = (
        "attributes",
        "autocast",
        "buffers",
        "copied",
        "generators",
        "gpus",
        "held",
        "kernels",
        "numpy",
        "python",
        "reach",
        "rng",
        "sums",
        "training",
    )

    def __init__(
        self, reach: MutableState, devices: Iterable[torch.device] = (), generators: Sequence[torch.Generator] = ()
    ) -> None:
        """Capture the state at the start of a call; `devices` and `generators` are those of its arguments."""
        self.reach = reach
        in_use = reach.gpus | gpus(devices)
        self.rng = torch.default_generator.get_state()
        self.gpus = [(gpu, torch.get_device_module(gpu).get_rng_state(gpu)) for gpu in in_use] if in_use else []
        drawn = {*reach.generators, *generators} if reach.generators or generators else ()
        self.generators = [(g, g.get_state()) for g in drawn] if drawn else []
        self.python: tuple[Any, ...] | None = python_state()
        self.numpy = numpy_state()
        kinds = {"cpu", *[gpu.type for gpu in in_use]}
        self.autocast = [(kind, _autocast(kind)) for kind in kinds]
        self.kernels = [enabled() for enabled, _ in ATTENTION_KERNELS]
        self.training = [module.training for module in reach.modules]
        self.attributes = Attributes(reach.modules)
        self.buffers = {
            (module, name): (buffer, buffer._version, buffer.detach().clone())
            for module, name, buffer in _buffers(reach.modules)
            if reach.written is None or (module, name) in reach.written or buffer.nbytes <= SMALL_BYTES
        }
        self.copied: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        """Parameters and buffers that were written to since, with copies of their contents before: table, name,
        tensor, copy.
        """
        self.held = self._held()
        self.sums = self._sums()

    def _sums(self) -> list[int | None]:
        """Return a checksum for each buffer in `held` that is cheap to sum; None for the others."""
        return [None if isinstance(t, torch.nn.Parameter) else _sum_of(t) for _, _, t, _ in self.held]

    @property
    def written_late(self) -> str | None:
        """Return the name of a buffer that this call wrote to and the first one did not, so that it was not copied."""
        for (_, name, tensor, version), before, now in zip(self.held, self.sums, self._sums(), strict=True):
            if not isinstance(tensor, torch.nn.Parameter) and (tensor._version != version or before != now):
                self.reach.forget()
                return name
        return None

    def _held(self) -> list[tuple[dict[str, Any], str, Tensor, int]]:
        """Return parameters, and buffers that are not copied: their table, name in it, tensor and version."""
        written = {(id(table), name) for table, name, *_ in self.copied}
        return [
            (table, name, tensor, tensor._version)
            for module in self.reach.modules
            for table, copied in ((module._parameters, ()), (module._buffers, self.buffers))
            for name, tensor in table.items()
            if tensor is not None and (module, name) not in copied and (not self.reach.units or is_plain(tensor))
            if (id(table), name) not in written
        ]

    def copy(self, storages: set[int], copy_of: Callable[[Tensor], Tensor]) -> bool:
        """Copy parameters and buffers in this memory, which is about to be written to; return True if there are any."""
        uncopied = []
        for held, before in zip(self.held, self.sums, strict=True):
            table, name, tensor, version = held
            if tensor._version == version and storage_id(tensor) in storages:
                self.copied.append((table, name, tensor, copy_of(tensor)))
            else:
                uncopied.append((held, before))
        has_copied = len(uncopied) < len(self.held)
        self.held, self.sums = [held for held, _ in uncopied], [before for _, before in uncopied]
        return self.attributes.copy(storages, copy_of) or has_copied

    def storages(self) -> Iterator[int]:
        """Yield the memory of the tensors that are read again, those included that `learn` may add."""
        held = (tensor for _, _, tensor, _ in self.held)
        for tensor in (*held, *(buffer for buffer, _, _ in self.buffers.values()), *self.attributes.held()):
            yield storage_id(tensor)

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that only this context holds: random number states and copies of buffers."""
        yield self.rng
        yield from (state for _, state in (*self.gpus, *self.generators))
        yield from (content for _, _, content in self.buffers.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes of `tensors`; for a module on a GPU, of those on a GPU only: RNG states are on the host."""
        on_gpu = bool(self.reach.gpus)
        return sum(tensor.nbytes for tensor in self.tensors if not on_gpu or tensor.device.type != "cpu")

    def learn(self) -> None:
        """End the call. Large buffers that the first call did not write to are not copied for later calls."""
        self.attributes.learn()
        reach = self.reach
        if reach.written is None:
            there = {(module, name): buffer for module, name, buffer in _buffers(reach.modules)}
            reach.written = frozenset(
                key
                for key, (buffer, version, content) in self.buffers.items()
                if there.get(key) is not buffer or buffer._version != version or not _equal(buffer, content)
            )
            for key, (buffer, _, _) in list(self.buffers.items()):
                if key not in reach.written and buffer.nbytes > SMALL_BYTES:
                    del self.buffers[key]
            self.held = self._held()
            self.sums = self._sums()
        # For each call: one that draws nothing may draw the next time.
        if python_state() is self.python:
            self.python = None
        if numpy_state() is self.numpy:
            self.numpy = None

    def restore(self) -> None:
        """Restore the state at the start of a call that has failed, permanently."""
        self.attributes.learn()
        self.attributes.put_back()
        with contextlib.ExitStack() as stack:
            self._restore_rng_states(stack)
            stack.pop_all()  # a restore without a way back
        for module, flag in zip(self.reach.modules, self.training, strict=True):
            vars(module)["training"] = flag
        for (module, name), (buffer, _, content) in self.buffers.items():
            module._buffers[name] = buffer
            if not _equal(buffer, content):
                buffer.data.copy_(content)  # written without a new version, because other graphs may have saved it

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the state at the start of the call inside the block, and the current state after it."""
        with contextlib.ExitStack() as stack:
            stack.callback(_rebind, _bindings(self.reach.modules))
            self._restore_parameters_and_buffers()
            for tensor, version in self.attributes.tensors:
                if tensor._version != version:
                    raise self._overwritten(tensor, version)
            self.attributes.put_back()
            self._restore_rng_states(stack)
            for (enabled, switch), then in zip(ATTENTION_KERNELS, self.kernels, strict=True):
                if enabled() != then:
                    stack.callback(switch, not then)
                    switch(then)
            for module, flag in zip(self.reach.modules, self.training, strict=True):
                vars(module)["training"] = flag
            copies: dict[int, Tensor] = {}  # a tensor shared by two modules stays shared
            for table, name, tensor, content in self.copied:
                like = content.clone()
                if isinstance(tensor, torch.nn.Parameter):
                    like = torch.nn.Parameter(like, requires_grad=tensor.requires_grad)
                table[name] = copies.setdefault(id(tensor), like)
            for (module, name), (buffer, _, content) in self.buffers.items():
                module._buffers[name] = copies.setdefault(id(buffer), content.clone())
            for kind, state in self.autocast:
                if state != _autocast(kind):
                    on, dtype, cache = state
                    stack.enter_context(torch.autocast(kind, enabled=on, dtype=dtype, cache_enabled=cache))
            with torch.enable_grad():
                yield

    def _restore_parameters_and_buffers(self) -> None:
        """Restore the call's parameters and buffers, if others have taken their places (as in `functional_call`).

        A parameter that was changed in place since is replaced by a tensor that raises on use: an optimizer that steps
        inside backward changes only parameters that backward has finished with, and a replay that is needed after that
        stops before it reaches them, or must not run. Raises Overwritten for a buffer that was changed.
        """
        for table, name, tensor, version in self.held:
            if tensor._version != version:
                if not isinstance(tensor, torch.nn.Parameter):
                    self.reach.forget()
                    raise self._overwritten(tensor, version)
                table[name] = changed = as_kind(_Changed, tensor.detach())
                changed.overwritten = partial(self._overwritten, tensor, version)
            elif name not in table or table[name] is not tensor:
                table[name] = tensor if tensor.is_leaf else tensor.detach().requires_grad_()

    def _overwritten(self, tensor: Tensor, version: int) -> Overwritten:
        """Return the error of a call that can't be run again, because a tensor it had read was written to since."""
        self.reach.is_overwritten = True
        kind = type(self.reach.modules[0])
        return Overwritten(tensor, version, kind.__name__, kind)

    def _restore_rng_states(self, stack: contextlib.ExitStack) -> None:
        """Set all random number generators back to the start of the call."""
        own = torch.default_generator  # torch.set_rng_state without calls of Python functions
        stack.callback(own.set_state, own.get_state())
        own.set_state(self.rng)
        for gpu, state in self.gpus:
            device = torch.get_device_module(gpu)
            stack.callback(device.set_rng_state, device.get_rng_state(gpu), gpu)
            device.set_rng_state(state, gpu)
        for generator, state in self.generators:
            stack.callback(generator.set_state, generator.get_state())
            generator.set_state(state)
        if self.python is not None:
            stack.callback(random.setstate, python_state())
            random.setstate(self.python)
        if self.numpy is not None:
            stack.callback(set_numpy_state, numpy_state())
            set_numpy_state(self.numpy)


class _Changed(torch.Tensor):
    """A replacement for a parameter that has changed since the call: any operation on it raises."""

    overwritten: Callable[[], Overwritten]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(leaf.overwritten() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))


Bindings = list[tuple[dict[str, Any], dict[str, Any]]]
"""Tables of attributes, buffers and parameters, each with a copy of its contents."""


def _bindings(modules: tuple[nn.Module, ...]) -> Bindings:
    """Return the bindings of the modules' attributes, buffers and parameters."""
    bindings: Bindings = []
    for module in modules:
        for table in (vars(module), module._buffers, module._parameters):
            if table and isinstance(table, dict):  # a scripted module's tables are no dicts and can't be rebound
                bindings.append((table, dict(table)))
    return bindings


def _rebind(bindings: Bindings) -> None:
    """Undo all changes of the tables' bindings since `_bindings` copied them."""
    for table, was in bindings:
        if len(table) != len(was):
            for name in table.keys() - was.keys():
                del table[name]
        table.update(was)


def gpus(devices: Iterable[torch.device]) -> frozenset[torch.device]:
    """Return the devices with random number generators besides the CPU's."""
    return frozenset(device for device in devices if device.type not in ("cpu", "meta"))


def _autocast(kind: str) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _buffers(modules: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    return (
        (module, name, buffer)
        for module in modules
        if module._buffers
        for name, buffer in module._buffers.items()
        if buffer is not None
    )


def _sum_of(tensor: Tensor) -> int | None:
    if tensor.device.type != "cpu" or not is_plain(tensor) or tensor.untyped_storage().nbytes() > LARGEST_SUMMED:
        return None
    return zlib.crc32(bytes_of(tensor))


def _equal(buffer: Tensor, content: Tensor) -> bool:
    """Return True if a buffer is unchanged, even without a new version: native batch norm and `.data` write so."""
    if is_fake(buffer) or not is_plain(buffer):
        return True
    return torch.equal(buffer, content)
