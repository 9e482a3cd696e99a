"""State that a module call reads in addition to its arguments, captured when the call begins and restored around a
replay.

Random numbers (torch on the CPU and on the module's GPUs, generators passed to it, Python, NumPy), autocast, the
kernels that attention may use, training flags, buffers and plain attributes are restored; after the replay they return
to their state before it. Parameters, and buffers that the call does not write to, are not copied: a replay that finds
other contents in them is refused.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.fake_modes import bytes_of, is_fake
from lowtide._torch.modes import ATTENTION_KERNELS, set_grad_enabled
from lowtide._torch.modules import bind_cached_weights, cached_weights, n_parametrization_caches
from lowtide._torch.pytree import tree_leaves
from lowtide._torch.tensors import as_kind, is_plain, storage_id
from lowtide.runtime import exposed_memory, host_rng
from lowtide.runtime import module_hooks as hooks
from lowtide.runtime.exposed_memory import EXPOSED, Contents
from lowtide.runtime.fsdp_scopes import units
from lowtide.runtime.host_rng import set_numpy_state
from lowtide.runtime.known_modules import KnownModules, bindings, can_be_known, rebind
from lowtide.runtime.module_attributes import Attributes
from lowtide.runtime.saved_values import native
from lowtide.runtime.tensor_writers import Overwritten

if TYPE_CHECKING:
    from torch import Tensor, nn

SMALL_BYTES = 2**16
"""Largest size in bytes of a buffer that is copied for every call, because batch norm writes to its buffers without a
new version.
"""

MOST_KNOWN = 4
"""Number of calls in a row after which modules that have changed each time are no longer compared."""

LARGEST_SUMMED = 2**20
"""Largest size in bytes of a buffer on the CPU for which writes to its `.data` are detected."""


_VERSION: Final = attrgetter("_version")
_TENSOR: Final = itemgetter(2)
_CPU: Final = ("cpu",)
_FLASH, _EFFICIENT, _MATH, _CUDNN = (enabled for enabled, _ in ATTENTION_KERNELS)
_WITHOUT_GRAD: Final = partial(set_grad_enabled, False)


class MutableState:
    """State that calls of one module can change, and the part of it that the first call did change."""

    __slots__ = (
        "generators",
        "gpus",
        "holds",
        "is_overwritten",
        "known",
        "modules",
        "n_known",
        "units",
        "written",
    )  # fmt: skip

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
        self.known: Known | None = None
        """The modules as an earlier call found them; None if the latest call found others."""
        self.n_known = 0
        """Number of calls in a row that captured all of their state for later ones."""

    def forget(self) -> None:
        """Forget the written buffers, so that the next call is observed again."""
        self.written = self.known = None

    def as_known(self) -> Known | None:
        """Return the modules as an earlier call found them, if a call that begins now finds the same."""
        if self.known is not None:
            if self.known.modules.current() is None:
                self.known = None  # tensors in it may be no longer in use
            else:
                self.n_known = 0
        return self.known

    def get_to_know(self, context: CallContext) -> None:
        """Let later calls compare the modules with those of a call that is about to begin, which `context` captured."""
        if self.written is None or self.units or self.n_known == MOST_KNOWN:
            return
        self.n_known += 1
        if can_be_known(self.modules, context.attributes):
            self.known = Known(KnownModules(self.modules, context.attributes), context)


class Known:
    """State of a call that later calls share if they find the same modules."""

    __slots__ = ("copied", "exposed", "held", "modules", "n_exposures", "summed", "training")

    def __init__(self, modules: KnownModules, context: CallContext) -> None:
        self.modules, self.training = modules, [*context.training]
        self.held = context.held
        self.summed = context.summed
        self.copied = [(module, name, buffer) for (module, name), (buffer, _, _) in context.buffers.items()]
        """Buffers that each call copies."""
        self.exposed: list[int] = []
        """Places of the exposed tensors in `held`, as found when the number of exposures was `n_exposures`."""
        self.n_exposures = -1


class CallContext:
    """State that one call reads."""

    __slots__ = (
        "_memory",
        "attributes",
        "buffers",
        "cached_weights",
        "contents",
        "copied",
        "generators",
        "gpus",
        "held",
        "kinds",
        "known",
        "modes",
        "numpy",
        "python",
        "reach",
        "rng",
        "summed",
        "sums",
        "training",
        "versions",
    )

    def __init__(
        self,
        reach: MutableState,
        devices: Iterable[torch.device] | None = None,
        generators: Sequence[torch.Generator] = (),
        known: Known | None = None,
    ) -> None:
        """Capture the state at the start of a call; `devices` and `generators` are those of its arguments.

        `known`: the result of `reach.as_known` just before.
        """
        self.reach, self.known = reach, known
        in_use = reach.gpus | gpus(devices) if devices else reach.gpus
        self.rng = torch.default_generator.get_state()
        self.gpus = [(gpu, torch.get_device_module(gpu).get_rng_state(gpu)) for gpu in in_use] if in_use else []
        drawn = {*reach.generators, *generators} if reach.generators or generators else ()
        self.generators = [(g, g.get_state()) for g in drawn] if drawn else []
        self.python: tuple[Any, ...] | None
        self._memory, self.python, self.numpy = host_rng.states()
        self.kinds = ("cpu", *{gpu.type for gpu in in_use}) if in_use else _CPU
        self.modes = _modes(self.kinds)
        """Autocast and attention's kernels: see `_modes`."""
        self.cached_weights = cached_weights(reach.modules) if n_parametrization_caches() else {}
        """Weights that `parametrize.cached()` has computed before the call."""
        self.copied: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        """Parameters and buffers that were written to since, with copies of their contents before: table, name,
        tensor, copy.
        """
        self.held: list[tuple[dict[str, Any], str, Tensor]]
        """Parameters, and buffers that are not copied: their table, their name in it, and the tensor."""
        self.summed: list[int]
        """Places of the buffers among them."""
        self.buffers: dict[tuple[nn.Module, str], tuple[Tensor, int, Tensor]] = {}
        if known is not None:
            self.training: list[bool] = known.training
            self.attributes = known.modules.attributes
            self.held, self.summed = known.held, known.summed
            for module, name, buffer in known.copied:
                self.buffers[module, name] = buffer, buffer._version, buffer.detach().clone()
        else:
            self.training = [module.training for module in reach.modules]
            self.attributes = Attributes(reach.modules)
            for module, name, buffer in _buffers(reach.modules):
                if reach.written is None or (module, name) in reach.written or buffer.nbytes <= SMALL_BYTES:
                    self.buffers[module, name] = buffer, buffer._version, buffer.detach().clone()
            self._hold()
        self.versions = [*map(_VERSION, map(_TENSOR, self.held))]
        """Versions of the tensors in `held` when the call began; `EXPOSED` for those in `contents`."""
        self.contents: dict[int, Contents] = {}
        """Contents of exposed tensors in `held`, by `id`."""
        self.sums = self._sums() if self.summed else []
        """Checksum for each of the buffers in `held` that is cheap to sum; None for the others."""

    def _sums(self) -> list[int | None]:
        return [_sum_of(self.held[place][2]) for place in self.summed]

    @property
    def written_late(self) -> str | None:
        """Return the name of a buffer that this call wrote to, and that was not copied because the first call left it
        alone.
        """
        if not self.summed:
            return None
        for place, before, now in zip(self.summed, self.sums, self._sums(), strict=True):
            _, name, tensor = self.held[place]
            if self._is_changed(tensor, self.versions[place]) or before != now:
                self.reach.forget()
                return name
        return None

    def _hold(self) -> None:
        """Record the parameters, and the buffers that are not copied."""
        written = {(id(table), name) for table, name, *_ in self.copied}
        self.held = [
            (table, name, tensor)
            for module in self.reach.modules
            for table, copied in ((module._parameters, ()), (module._buffers, self.buffers))
            for name, tensor in table.items()
            if tensor is not None and (module, name) not in copied and (not self.reach.units or is_plain(tensor))
            if (id(table), name) not in written
        ]
        self.summed = self._places_of_buffers()

    def copy(self, storages: set[int], copy_of: Callable[[Tensor], Tensor]) -> bool:
        """Copy parameters and buffers in `storages`, which are about to be written to; return True if there are any."""
        n_copied, sums = len(self.copied), dict(zip(self.summed, self.sums, strict=True))
        uncopied: list[int] = []
        for place, ((table, name, tensor), version) in enumerate(zip(self.held, self.versions, strict=True)):
            if storage_id(tensor) in storages and not self._is_changed(tensor, version):
                self.copied.append((table, name, tensor, copy_of(tensor)))
            else:
                uncopied.append(place)
        if len(self.copied) == n_copied:
            return self.attributes.copy(storages, copy_of)
        self.sums = [sums[place] for place in uncopied if place in sums]
        self.held, self.versions = [self.held[n] for n in uncopied], [self.versions[n] for n in uncopied]
        self.summed = self._places_of_buffers()
        self.attributes.copy(storages, copy_of)
        return True

    def _places_of_buffers(self) -> list[int]:
        return [n for n, (_, _, tensor) in enumerate(self.held) if not isinstance(tensor, torch.nn.Parameter)]

    def storages(self) -> Iterator[int]:
        """Yield the memory of the tensors that a replay reads again, including those that `learn` may add."""
        yield from (storage_id(tensor) for _, _, tensor in self.held)
        yield from (storage_id(buffer) for buffer, _, _ in self.buffers.values())
        yield from map(storage_id, self.attributes.held())

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
        if self.known is None:
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
            self._hold()
            self.versions = [*map(_VERSION, map(_TENSOR, self.held))]
            self.sums = self._sums()
            if self.contents:
                self.expose(exposed_memory.is_exposed)
        # For each call: one that draws nothing may draw the next time.
        memory, self._memory = self._memory, None
        if memory is not None and host_rng.memory() == memory:
            self.python = self.numpy = None
        else:
            if host_rng.python_state() is self.python:
                self.python = None
            if host_rng.numpy_state() is self.numpy:
                self.numpy = None

    def restore(self) -> None:
        """Restore the state at the start of a call that has failed, permanently."""
        self.attributes.learn()
        self.attributes.restore()
        self.restore_rng_states([])  # a restore without a way back
        for module, flag in zip(self.reach.modules, self.training, strict=True):
            vars(module)["training"] = flag
        for (module, name), (buffer, _, content) in self.buffers.items():
            module._buffers[name] = buffer
            if not _equal(buffer, content):
                buffer.data.copy_(content)  # written without a new version, because other graphs may have saved it

    @property
    def held_versions(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the tensors in `held`, each with its version when the call began."""
        return ((tensor, version) for (_, _, tensor), version in zip(self.held, self.versions, strict=True))

    @property
    def has_changed(self) -> bool:
        """Return True if a tensor in `held` was written to since the call began."""
        return any(map(self._is_changed, map(_TENSOR, self.held), self.versions))

    def _is_changed(self, tensor: Tensor, version: int) -> bool:
        if tensor._version == version:
            return False
        return version != EXPOSED or not self.contents[id(tensor)].are_in(tensor)

    def expose(self, is_exposed: Callable[[Tensor], bool]) -> None:
        """Compare from now on the contents of the tensors in `held` for which `is_exposed` is True."""
        for place, (_, _, tensor) in enumerate(self.held):
            if tensor._version == self.versions[place] and is_exposed(tensor):
                self._expose(place)

    def expose_held(self) -> None:
        """Compare from now on the contents of the tensors in `held` that are exposed when the call begins."""
        known, n_exposures = self.known or self.reach.known, exposed_memory.n_exposures
        if known is None or known.held is not self.held:
            self.expose(exposed_memory.is_exposed)
            return
        if known.n_exposures != n_exposures:
            known.exposed = [n for n, (_, _, tensor) in enumerate(self.held) if exposed_memory.is_exposed(tensor)]
            known.n_exposures = n_exposures
        for place in known.exposed:
            self._expose(place)

    def _expose(self, place: int) -> None:
        tensor = self.held[place][2]
        if id(tensor) not in self.contents:
            self.contents[id(tensor)] = Contents(tensor)
        self.versions[place] = EXPOSED

    def restore_modules(self) -> None:
        """Restore parameters, buffers, attributes and training flags, as the call found them."""
        self._restore_parameters_and_buffers()
        for tensor, version in self.attributes.tensors:
            if tensor._version != version:
                raise self._overwritten(tensor, version)
        self.attributes.restore()
        for module, flag in zip(self.reach.modules, self.training, strict=True):
            vars(module)["training"] = flag

    def bind_copies(self) -> None:
        """Put copies in the place of tensors that the call wrote to, or that were written to since."""
        copies: dict[int, Tensor] = {}  # a tensor shared by two modules stays shared
        for table, name, tensor, content in self.copied:
            like = content.clone()
            if isinstance(tensor, torch.nn.Parameter):
                like = torch.nn.Parameter(like, requires_grad=tensor.requires_grad)
            table[name] = copies.setdefault(id(tensor), like)
        for (module, name), (buffer, _, content) in self.buffers.items():
            module._buffers[name] = copies.setdefault(id(buffer), content.clone())

    def restore_modes(self, undo: list[Callable[[], object]]) -> None:
        """Restore autocast and attention's kernels; add functions that bring back the present settings to `undo`."""
        kernels, cache, *autocast = self.modes
        for (enabled, switch), then in zip(ATTENTION_KERNELS, kernels, strict=True):
            if enabled() != then:
                undo.append(partial(switch, not then))
                switch(then)
        for kind, on, dtype in zip(self.kinds, autocast[::2], autocast[1::2], strict=True):
            block = torch.autocast(kind, enabled=on, dtype=dtype, cache_enabled=cache)
            block.__enter__()  # type: ignore[no-untyped-call]
            undo.append(partial(block.__exit__, None, None, None))

    def _restore_parameters_and_buffers(self) -> None:
        """Restore the call's parameters and buffers if other tensors have taken their places (as in `functional_call`).

        A parameter that was changed in place since is replaced by a tensor that raises on use: an optimizer that steps
        inside backward changes only parameters that backward has finished with, and a replay that is needed after that
        stops before it reaches them, or must not run. Raises Overwritten for a buffer that was changed.
        """
        for (table, name, tensor), version in zip(self.held, self.versions, strict=True):
            if self._is_changed(tensor, version):
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

    def restore_rng_states(self, undo: list[Callable[[], object]]) -> None:
        """Set all random number generators to their states at the start of the call; add functions that bring back the
        present states to `undo`.
        """
        own = torch.default_generator  # torch.set_rng_state without calls of Python functions
        undo.append(partial(own.set_state, own.get_state()))
        own.set_state(self.rng)
        for gpu, state in self.gpus:
            device = torch.get_device_module(gpu)
            undo.append(partial(device.set_rng_state, device.get_rng_state(gpu), gpu))
            device.set_rng_state(state, gpu)
        for generator, state in self.generators:
            undo.append(partial(generator.set_state, generator.get_state()))
            generator.set_state(state)
        if self.python is not None:
            undo.append(partial(random.setstate, host_rng.python_state()))
            random.setstate(self.python)
        if self.numpy is not None:
            undo.append(partial(set_numpy_state, host_rng.numpy_state()))
            set_numpy_state(self.numpy)


class Again:
    """Context manager that restores the state at the start of a call, and at its end the present state.

    Inside the block no hooks of modules run except those in `acting`.
    """

    __slots__ = ("_acting", "_context", "_undo")

    def __init__(self, context: CallContext, acting: Container[int] = ()) -> None:
        self._context, self._acting = context, acting
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        context, undo = self._context, self._undo
        if not torch.is_grad_enabled():
            set_grad_enabled(True)
            undo.append(_WITHOUT_GRAD)
        try:
            known = context.known
            has_changed = known is None or [*map(_VERSION, map(_TENSOR, context.held))] != context.versions
            values = None if known is None or has_changed else known.modules.current()
            if known is None or values is None:
                modules = context.reach.modules
                undo.append(partial(rebind, bindings(modules)))
                context.restore_modules()
                hooks.silence_others(self._acting, modules, undo)
            else:
                undo.append(partial(known.modules.rebind, values))
            if context.buffers or context.copied:
                context.bind_copies()
            context.restore_rng_states(undo)
            if context.modes != _modes(context.kinds):
                context.restore_modes(undo)
            if context.cached_weights or n_parametrization_caches():
                undo.append(bind_cached_weights(context.cached_weights))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()


class _Changed(torch.Tensor):
    """A replacement for a parameter that has changed since the call: any operation on it raises."""

    overwritten: Callable[[], Overwritten]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(leaf.overwritten() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))


def gpus(devices: Iterable[torch.device]) -> frozenset[torch.device]:
    """Return the devices, other than the CPU, that have random number generators."""
    return frozenset(device for device in devices if device.type not in ("cpu", "meta"))


def _modes_in_python(kinds: tuple[str, ...]) -> list[Any]:
    """Return the kernels that attention may use, and autocast's cache, flag and dtype for the `kinds` of devices."""
    modes = [(_FLASH(), _EFFICIENT(), _MATH(), _CUDNN()), torch.is_autocast_cache_enabled()]
    for kind in kinds:
        modes += torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return modes


_modes: Callable[[tuple[str, ...]], list[Any]] = _modes_in_python if native is None else native.modes


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
    """Return True if a buffer is unchanged: native batch norm and `.data` write without a new version."""
    if is_fake(buffer) or not is_plain(buffer):
        return True
    return torch.equal(buffer, content)
