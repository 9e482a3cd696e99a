"""State that a module call reads in addition to its arguments, captured when the call begins and restored around a
replay.

Random numbers (`random_states.py`), autocast and the kernels that attention may use (`compute_modes.py`), training
flags, buffers and plain attributes are restored; after the replay they return to their state before it. Parameters, and
buffers that the call does not write to, are not copied (`uncopied_tensors.py`): a replay that would read other contents
in them raises.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.modes import set_grad_enabled
from lowtide._torch.modules import bind_cached_weights, cached_weights, n_parametrization_caches
from lowtide._torch.pytree import tree_leaves
from lowtide._torch.tensors import as_kind, get_storage_id, is_plain
from lowtide.runtime import exposed_memory
from lowtide.runtime import module_hooks as hooks
from lowtide.runtime.compute_modes import compute_modes, restore_modes
from lowtide.runtime.fsdp_scopes import find_units
from lowtide.runtime.known_modules import KnownModules, bindings, can_be_known, rebind
from lowtide.runtime.module_attributes import Attributes
from lowtide.runtime.random_states import RandomStates, with_generators
from lowtide.runtime.tensor_writers import Overwritten
from lowtide.runtime.uncopied_tensors import TENSOR_OF, VERSION_OF, Place, UncopiedTensors, find_places

if TYPE_CHECKING:
    from torch import Tensor, nn

SMALL_BYTES = 2**16
"""Largest size in bytes of a buffer that is copied for every call, because batch norm writes to its buffers without a
new version.
"""

MOST_KNOWN = 4
"""Number of calls in a row after which modules that have changed each time are no longer compared."""

_CPU: Final = ("cpu",)
_WITHOUT_GRAD: Final = partial(set_grad_enabled, False)


class MutableState:
    """State that calls of one module can read and change, and a record of the changes that calls have made."""

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
        self.units = tuple(find_units(self.modules))
        """Modules sharded by FSDP2, whose parameters are other tensors while the modules run."""
        self.gpus = with_generators(tensor.device for tensor in (*module.parameters(), *module.buffers()))
        attributes = (item for part in self.modules for item in vars(part).values())
        self.generators = tuple(item for item in attributes if isinstance(item, torch.Generator))
        self.written: frozenset[tuple[nn.Module, str]] | None = None
        """Large buffers that a call writes to; None until one call has been observed."""
        self.holds = False
        """True if a call runs backward inside its forward, so that a replay has to hold the tensors that it saves."""
        self.is_overwritten = False
        """True once a tensor that a call had read was written to before backward: no call is run again from then on."""
        self.known: Known | None = None
        """State captured by an earlier call; None if the modules have changed since."""
        self.n_known = 0
        """Number of calls in a row that captured all of their state for later ones."""

    def forget(self) -> None:
        """Forget which buffers calls write to and what earlier calls captured: the next call is observed again."""
        self.written = self.known = None

    def overwritten(self, tensor: Tensor, version: int) -> Overwritten:
        """Mark the module, so that none of its calls is run again from now on; return the error to raise.

        The reason is a write to `tensor`, which had the version `version` when a call read it.
        """
        self.is_overwritten = True
        kind = type(self.modules[0])
        return Overwritten(tensor, version, kind.__name__, kind)

    def as_known(self) -> Known | None:
        """Return the state that an earlier call captured if the modules are unchanged since; else None."""
        if self.known is not None:
            if self.known.modules.current() is None:
                self.known = None  # it may hold tensors that are no longer in use
            else:
                self.n_known = 0
        return self.known

    def get_to_know(self, context: CallContext) -> None:
        """Store the state in `context`, which a call has just captured, for later calls that find the modules
        unchanged.

        Nothing is stored if later calls could not tell that the modules have changed.
        """
        if self.written is None or self.units or self.n_known == MOST_KNOWN:
            return
        self.n_known += 1
        if can_be_known(self.modules, context.attributes):
            self.known = Known(KnownModules(self.modules, context.attributes), context)


class Known:
    """State captured by one call, which later calls share if they find the modules unchanged."""

    __slots__ = ("copied", "exposed", "modules", "n_exposures", "places", "summed", "training")

    def __init__(self, modules: KnownModules, context: CallContext) -> None:
        self.modules, self.training = modules, [*context.training]
        self.places, self.summed = context.uncopied.places, context.uncopied.summed
        self.copied = [(module, name, buffer) for (module, name), (buffer, _, _) in context.buffers.items()]
        """Buffers that each call copies."""
        self.exposed: list[int] = []
        """Numbers of the exposed tensors in `places`, as found when the number of exposures was `n_exposures`."""
        self.n_exposures = -1


class CallContext:
    """State that one module call reads in addition to its arguments, captured when the call begins."""

    __slots__ = (
        "attributes",
        "buffers",
        "cached_weights",
        "kinds",
        "known",
        "modes",
        "mutable_state",
        "random",
        "training",
        "uncopied",
    )

    def __init__(
        self,
        mutable_state: MutableState,
        devices: Iterable[torch.device] | None = None,
        generators: Sequence[torch.Generator] = (),
        known: Known | None = None,
    ) -> None:
        """Capture the state at the start of a call; `devices` and `generators` are those of its arguments.

        `known` is the result of `mutable_state.as_known` just before the call: state in it is not captured again.
        """
        self.mutable_state, self.known = mutable_state, known
        in_use = mutable_state.gpus | with_generators(devices) if devices else mutable_state.gpus
        drawn = {*mutable_state.generators, *generators} if mutable_state.generators or generators else ()
        self.random = RandomStates(in_use, drawn)
        self.kinds = ("cpu", *{gpu.type for gpu in in_use}) if in_use else _CPU
        self.modes = compute_modes(self.kinds)
        self.cached_weights = cached_weights(mutable_state.modules) if n_parametrization_caches() else {}
        """Weights that `parametrize.cached()` has computed before the call."""
        self.buffers: dict[tuple[nn.Module, str], tuple[Tensor, int, Tensor]] = {}
        """Buffers that are copied, with their versions and copies."""
        if known is not None:
            self.training: list[bool] = known.training
            self.attributes = known.modules.attributes
            for module, name, buffer in known.copied:
                self.buffers[module, name] = buffer, buffer._version, buffer.detach().clone()
            self.uncopied: UncopiedTensors = UncopiedTensors(known.places, known.summed)
        else:
            self.training = [module.training for module in mutable_state.modules]
            self.attributes = Attributes(mutable_state.modules)
            for module, name, buffer in _iterate_buffers(mutable_state.modules):
                written = mutable_state.written
                if written is None or (module, name) in written or buffer.nbytes <= SMALL_BYTES:
                    self.buffers[module, name] = buffer, buffer._version, buffer.detach().clone()
            self.uncopied = UncopiedTensors([*self._places()])

    def _places(self) -> Iterator[Place]:
        """Yield where the modules store each of their parameters, and each buffer that is not copied."""
        return find_places(self.mutable_state.modules, self.buffers, only_plain=bool(self.mutable_state.units))

    def learn(self) -> None:
        """Record the end of the call. Large buffers that the first call did not write to are not copied for later
        calls.
        """
        if self.known is None:
            self.attributes.learn()
        mutable_state = self.mutable_state
        if mutable_state.written is not None:
            return
        there = {(module, name): buffer for module, name, buffer in _iterate_buffers(mutable_state.modules)}
        mutable_state.written = frozenset(
            key
            for key, (buffer, version, content) in self.buffers.items()
            if there.get(key) is not buffer or buffer._version != version or not _has_same_elements(buffer, content)
        )
        for key, (buffer, _, _) in list(self.buffers.items()):
            if key not in mutable_state.written and buffer.nbytes > SMALL_BYTES:
                del self.buffers[key]
        self.uncopied.record_again(self._places())

    @property
    def written_late(self) -> str | None:
        """Return the name of a buffer that this call wrote to, and that was not copied because the first call left it
        alone; None if there is none.
        """
        name = self.uncopied.find_written_buffer()
        if name is not None:
            self.mutable_state.forget()
        return name

    def copy(self, storages: set[int], copy_of: Callable[[Tensor], Tensor]) -> bool:
        """Copy the tensors in `storages` that the call has read, by `copy_of`; return True if there are any.

        This is called before a write to these storages.
        """
        is_copied = self.uncopied.copy(storages, copy_of)
        return self.attributes.copy(storages, copy_of) or is_copied

    def storages(self) -> Iterator[int]:
        """Yield the ids of the storages that a replay reads again, including those of tensors that `learn` may add."""
        yield from (get_storage_id(tensor) for _, _, tensor in self.uncopied.places)
        yield from (get_storage_id(buffer) for buffer, _, _ in self.buffers.values())
        yield from map(get_storage_id, self.attributes.held())

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that only this context holds: random number states and copies of buffers."""
        yield from self.random.tensors
        yield from (content for _, _, content in self.buffers.values())

    @property
    def nbytes(self) -> int:
        """Return the bytes of `tensors`; for a module on a GPU only tensors on GPUs count, since RNG states are on the
        host.
        """
        on_gpu = bool(self.mutable_state.gpus)
        return sum(tensor.nbytes for tensor in self.tensors if not on_gpu or tensor.device.type != "cpu")

    def expose_uncopied(self) -> None:
        """Record checksums of the uncopied tensors whose memory code may write to without a new tensor version."""
        known, n_exposures = self.known or self.mutable_state.known, exposed_memory.n_exposures
        if known is None or known.places is not self.uncopied.places:
            self.uncopied.expose(exposed_memory.is_exposed)
            return
        if known.n_exposures != n_exposures:
            known.exposed = [n for n, (_, _, tensor) in enumerate(known.places) if exposed_memory.is_exposed(tensor)]
            known.n_exposures = n_exposures
        for n in known.exposed:
            self.uncopied.expose_at(n)

    # --- restored

    def restore(self) -> None:
        """Restore, permanently, the state at the start of a call that has failed."""
        self.attributes.learn()
        self.attributes.restore()
        self.random.restore([])  # permanently: the functions that would undo it are dropped
        self._restore_training()
        for (module, name), (buffer, _, content) in self.buffers.items():
            module._buffers[name] = buffer
            if not _has_same_elements(buffer, content):
                buffer.data.copy_(content)  # written without a new version, because other graphs may have saved it

    def restore_modules(self) -> None:
        """Restore the modules' parameters, buffers, attributes and training flags to those at the start of the call.

        Raises Overwritten if a buffer or an attribute's tensor was written to since.
        """
        self._restore_uncopied()
        for tensor, version in self.attributes.tensors:
            if tensor._version != version:
                raise self.mutable_state.overwritten(tensor, version)
        self.attributes.restore()
        self._restore_training()

    def _restore_training(self) -> None:
        for module, flag in zip(self.mutable_state.modules, self.training, strict=True):
            vars(module)["training"] = flag

    def _restore_uncopied(self) -> None:
        """Restore the call's parameters and buffers if other tensors have taken their places (as in `functional_call`).

        A parameter that was changed in place since is replaced by a tensor that raises on use, because a replay may
        stop before it uses that parameter, as after an optimizer that steps inside backward. Raises Overwritten for a
        buffer that was changed.
        """
        uncopied = self.uncopied
        for (table, name, tensor), version in zip(uncopied.places, uncopied.versions, strict=True):
            if uncopied.is_changed(tensor, version):
                if not isinstance(tensor, torch.nn.Parameter):
                    self.mutable_state.forget()
                    raise self.mutable_state.overwritten(tensor, version)
                table[name] = changed = as_kind(_Changed, tensor.detach())
                changed.overwritten = partial(self.mutable_state.overwritten, tensor, version)
            elif name not in table or table[name] is not tensor:
                table[name] = tensor if tensor.is_leaf else tensor.detach().requires_grad_()

    def bind_copies(self) -> None:
        """Set the modules' parameters and buffers to copies where the originals may have been written to.

        The copies were made when the call began, or before a write.
        """
        copies: dict[int, Tensor] = {}  # a tensor shared by two modules stays shared
        for table, name, tensor, content in self.uncopied.copies:
            like = content.clone()
            if isinstance(tensor, torch.nn.Parameter):
                like = torch.nn.Parameter(like, requires_grad=tensor.requires_grad)
            table[name] = copies.setdefault(id(tensor), like)
        for (module, name), (buffer, _, content) in self.buffers.items():
            module._buffers[name] = copies.setdefault(id(buffer), content.clone())


class StateAtCall:
    """Context manager that restores the state at the start of a module call, and the present state at its end.

    Inside the block no module hooks run, except those whose keys are in `acting`.
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
            known, uncopied, values = context.known, context.uncopied, None
            if known is not None and [*map(VERSION_OF, map(TENSOR_OF, uncopied.places))] == uncopied.versions:
                values = known.modules.current()
            if known is None or values is None:
                modules = context.mutable_state.modules
                undo.append(partial(rebind, bindings(modules)))
                context.restore_modules()
                hooks.silence_others(self._acting, modules, undo)
            else:
                undo.append(partial(known.modules.rebind, values))
            if context.buffers or uncopied.copies:
                context.bind_copies()
            context.random.restore(undo)
            if context.modes != compute_modes(context.kinds):
                restore_modes(context.modes, context.kinds, undo)
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


def _iterate_buffers(modules: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    return (
        (module, name, buffer)
        for module in modules
        if module._buffers
        for name, buffer in module._buffers.items()
        if buffer is not None
    )


def _has_same_elements(buffer: Tensor, content: Tensor) -> bool:
    """Return True if the elements of `buffer` equal those of `content`, an earlier copy.

    Elements are compared because native batch norm and `.data` write without a new version. A fake tensor, or a tensor
    that is not plain, counts as unchanged.
    """
    if is_fake(buffer) or not is_plain(buffer):
        return True
    return torch.equal(buffer, content)
