"""Writes, between forward and backward, to tensors that recomputes and replays read again, unnoticed by autograd.

Autograd checks the version of each tensor that it has saved. A recompute also reads other tensors, such as a bias, rows
of an embedding, or an added mask; and a replay reads every parameter of its call. A plain step tolerates a write to
such a tensor before backward. Most writers appear in a rehearsal, and no recompute uses the tensors they write to. Some
later writers are known in advance: optimizers, embeddings with `max_norm`, which torch renormalises in each forward,
and in-place methods. Tensors that are still to be read are copied before these writers run. Other writers are detected
in backward, too late for that step: by the version, or by the contents of memory that was exposed
(`exposed_memory.py`). From then on no recompute uses such a tensor.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.backward import backward_number, in_backward
from lowtide._torch.compiled_code import called_between_graphs, never_compiled
from lowtide._torch.fake_modes import n_function_modes, without_function_modes
from lowtide._torch.optim import list_parameters
from lowtide._torch.patching import replace_function
from lowtide._torch.tensors import NO_STORAGE, STORAGE, STORAGE_NUMBER, get_storage_id, is_same_memory
from lowtide.runtime import exposed_memory, inplace_methods
from lowtide.runtime.exposed_memory import EXPOSED
from lowtide.runtime.inplace_methods import ALIAS, SHARES_MEMORY
from lowtide.runtime.recipes import CannotRecompute
from lowtide.runtime.saved_fields import changed_in_place
from lowtide.runtime.saved_values import NO_NODE, Handle, Value, make_value_without_grad_fn, native

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lowtide.runtime.replay import ReplayFrame

T = TypeVar("T")

_overwritten: dict[int, weakref.ref[Tensor]] = {}
"""By `id`, tensors that were written to before backward had read them."""


class Overwritten(RuntimeError):
    """Error for a write, between forward and backward, to a tensor that a recompute or replay reads. No rehearsed step
    made such a write.
    """

    def __init__(self, tensor: Tensor, version: int, reader: str, module_class: type | None = None) -> None:
        name = next((own[0] for relied_on in _alive(_watching) if (own := relied_on.find(tensor))), "it")
        n_writes = tensor._version - version
        often = "once" if n_writes == 1 else f"{n_writes} times"
        how = changed_in_place(tensor, version)
        if version == EXPOSED:
            often = "without a new version"
            how = (
                "a tensor needed for gradient computation has been modified, through tensor.data or a NumPy array: "
                f"[{tensor.type()} {list(tensor.shape)}]."
            )
        super().__init__(
            f"{how}\n"
            f"  The plan recomputes {reader} from {name}, which was written to {often} between forward and "
            "backward; no rehearsed step did so. This step ends before its update. From here on values computed from "
            "that tensor are kept: a loop that catches this error can take the same batch again.\n"
            "  Write to it after backward, or fit (rehearse and plan) in a step that writes to it."
        )
        self.storage = get_storage_id(tensor)
        self.module_class = module_class
        """Class of the module that could not be run again, if a replay failed."""
        self.is_of_parameter = False
        """True if the tensor is a parameter, which recomputes will not use from now on."""


_FEW = 256
_OVERWRITTEN = "it is computed from a tensor that was overwritten before backward"


class ReliedOn:
    """Tensors that the recomputes and replays of one plan will read, and that stay in memory anyway."""

    def __init__(
        self, say: Callable[[Tensor, str], object], find: Callable[[Tensor], tuple[str, Tensor] | None]
    ) -> None:
        """Begin without tensors.

        `say` is called with each tensor that is copied and the name of its writer. `find` returns the parameter or
        buffer that has the same memory as a tensor, with its name.
        """
        self.find = find
        self.takes_values = True
        """True if recomputes will really run, not only on trial."""
        self._frames: list[weakref.ref[ReplayFrame]] = []
        self._values: list[weakref.ref[Value]] = []
        """Weak references to values, some of them dead. A WeakSet would drop dead ones, but takes more time for each
        value.
        """
        self._most = self._most_frames = _FEW
        self._storages: set[int] = set()
        """Ids of the tensors' storages, including storages freed since. Those of `_unlooked` are missing."""
        self._unlooked: deque[weakref.ref[Value] | weakref.ref[ReplayFrame]] = deque()
        """Values and replays whose memory is not in `_storages` yet."""
        self._newest: Callable[[], Value | ReplayFrame | None] = lambda: None
        """The value or replay that was added last, or another one that is not freed: shows quickly that any is left."""
        self._lock = threading.RLock()
        """Lock for everything except additions, because any thread may write to a tensor."""
        self._say = say
        self._waits = False
        """True until the first tensor to be read again, while the plan is in force."""
        self._stop: Callable[[], object] = lambda: None

    def of(self, value: Value, tensor: Tensor) -> Value:
        """Register that `value` holds `tensor` for a recompute, so that `tensor` is copied before a write; return
        `value`.
        """
        value.original = weakref.ref(tensor)
        if self.takes_values:
            if len(self._values) >= self._most:
                self._forget_freed()
            self._newest = reference = weakref.ref(value)
            self._values.append(reference)
            inplace_methods.watched = True
            if self._waits:
                self._begin()
            try:
                storage = STORAGE(tensor)
            except NO_STORAGE:
                return value
            self._storages.add(STORAGE_NUMBER(storage))
            # `is_exposed` is called only where it may be True: its call costs host time for each operand
            if (exposed_memory.n_aliases or not storage.resizable()) and exposed_memory.is_exposed(tensor):
                value.expose()
        return value

    def rely_on(self, values: Iterable[Value]) -> None:
        """Copy the tensors of these values before a write to them, although recomputes run only on trial."""
        references = [weakref.ref(value) for value in values if value.original is not None]
        self._values += references
        self._unlooked += references
        inplace_methods.watched = True
        if self._waits:
            self._begin()

    def add(self, frame: ReplayFrame) -> None:
        """Register the replay of `frame`, so that parameters and buffers that it reads are copied before a write."""
        if len(self._frames) >= self._most_frames:
            self._forget_freed()
        self._newest = reference = weakref.ref(frame)
        self._frames.append(reference)
        self._unlooked.append(reference)
        known = frame.call_context.known
        is_known = known is not None and not known.exposed and known.n_exposures == exposed_memory.n_exposures
        if self.takes_values and not is_known:
            frame.call_context.expose_uncopied()
        inplace_methods.watched = True
        if self._waits:
            self._begin()

    def may_read(self, storages: set[int]) -> bool | None:
        """Return True if `storages` may hold a tensor that will be read again; None if no such tensor is left at all.
        The check is fast, because it runs before each write.
        """
        with self._lock:
            if self._newest() is None and not self:
                return None
            while self._unlooked:
                reader = self._unlooked.popleft()()
                if isinstance(reader, Value):
                    if reader.original is not None and reader.tensor is not None:
                        try:
                            self._storages.add(STORAGE_NUMBER(STORAGE(reader.tensor)))
                        except NO_STORAGE:
                            continue
                elif reader is not None:
                    self._storages.update(reader.call_context.storages())
            return not self._storages.isdisjoint(storages)

    def _forget_freed(self) -> None:
        with self._lock:
            _drop_dead(self._values)
            _drop_dead(self._frames)
            self._most = max(_FEW, 2 * len(self._values))
            self._most_frames = max(_FEW, 2 * len(self._frames))
            for _ in range(len(self._unlooked)):
                reference = self._unlooked.popleft()
                if reference() is not None:
                    self._unlooked.append(reference)

    def hold_leaf(self, leaf: Tensor) -> Value:
        """Return a Value that holds the leaf tensor `leaf` as an operand of a recompute, and copy it before any write.

        Raises CannotRecompute if `leaf` was overwritten before backward in an earlier step.
        """
        if _overwritten and is_overwritten(leaf):
            raise CannotRecompute(_OVERWRITTEN)
        return self.of(make_value_without_grad_fn(leaf), leaf)

    def hold_slot(self, saved: Handle | Tensor) -> Handle:
        """Return a new handle on a saved tensor, as an operand of a recompute.

        For a tensor without `grad_fn` the handle gets a Value of its own: if the tensor is written to, the recompute
        reads a copy of its present content. Raises CannotRecompute if the tensor was overwritten before backward in an
        earlier step.
        """
        if not isinstance(saved, Handle):
            if _overwritten and is_overwritten(saved):
                raise CannotRecompute(_OVERWRITTEN)
            is_number = not (saved.requires_grad or saved.dim())  # `detach` would unwrap a wrapped number
            tensor = saved if is_number else saved.detach()
            if saved.grad_fn is not None or not self.takes_values:
                return Handle(Value(tensor))
            return Handle(self.of(Value(tensor), saved if saved.requires_grad else tensor))
        value, view = saved.value, saved.view
        if value.output != NO_NODE or value.tensor is None or not self.takes_values:
            return Handle(value, view)
        if _overwritten and is_overwritten(value.tensor):
            raise CannotRecompute(_OVERWRITTEN)
        own = Value(value.tensor, output=NO_NODE)
        own.version, own.leaf = value.version, value.leaf
        if isinstance(view, torch.Tensor):
            view = (
                None if value.leaf and view.requires_grad else (view.size(), view.stride(), int(view.storage_offset()))
            )
        return Handle(self.of(own, value.tensor), view)

    def watch(self) -> None:
        """Watch for writes to tensors that are still to be read, and copy these tensors first, until `leave` or until
        the plan's model is freed.

        Nothing is intercepted before there is such a tensor.
        """
        self._waits = True

    def _begin(self) -> None:
        global _watching
        self._waits = False
        _watching = *(reference for reference in _watching if reference() is not None), weakref.ref(self)
        if not _undo:
            _undo.extend(
                (
                    register_optimizer_step_pre_hook(_copy_before_update).remove,
                    inplace_methods.intercept(_copy_before_write, _is_spared),
                )
            )
        stop = replace_function(
            torch, "embedding_renorm_", functools.partial(functools.partial, _renormalise, weakref.ref(self))
        )
        self._stop = weakref.finalize(self, _leave, stop)

    def leave(self) -> None:
        """Stop watching for writes. A later backward compares the contents of tensors before it reads them.

        Repeated calls do nothing.
        """
        global _watching
        self._waits = False
        others = tuple(reference for reference in _watching if reference() not in (None, self))
        if len(others) < len(_watching) and self.takes_values:
            self._expose(lambda tensor: True)
        _watching = others
        self._stop()

    def before_write(self, storages: set[int], writer: str, *, is_habit: bool = False) -> None:
        """Copy the tensors in `storages`, to which `writer` is about to write.

        `is_habit` is True for a writer that writes in every step: no recompute or replay uses the tensors from then on.
        """
        copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

        def copy_of(tensor: Tensor) -> Tensor:
            # values of one buffer hold different tensors, which share a copy
            key = get_storage_id(tensor), tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype
            if key not in copies:
                copies[key] = tensor, _copy_with_geometry(tensor)
            return copies[key][1]

        for value in _alive(self._values):
            tensor = value.tensor if value.original and value.kept and not value.is_changed else None
            if tensor is not None and value.readers and get_storage_id(tensor) in storages:
                if is_habit and value.original is not None and (original := value.original()) is not None:
                    mark(original)
                value.keep(copy_of(tensor))
                value.original = None
        for frame in _alive(self._frames):
            if frame.call_context.copy(storages, copy_of) and is_habit:
                frame.interceptor.mutable_state.is_overwritten = True
        for tensor, _ in copies.values():
            if is_habit:
                mark(tensor)
            self._say(tensor, writer)

    def expose(self, storages: set[int]) -> None:
        """Record checksums of the tensors in these storages, to compare before each further read.

        This is called when code gets access to the memory by which it may write unnoticed.
        """
        self._expose(lambda tensor: get_storage_id(tensor) in storages)

    def _expose(self, is_exposed: Callable[[Tensor], bool]) -> None:
        for value in _alive(self._values):
            if value.original and value.tensor is not None and is_exposed(value.tensor):
                value.expose()
        for frame in _alive(self._frames):
            if frame.is_awaited:
                frame.call_context.uncopied.expose(is_exposed)

    def give_up(self, storage: int) -> None:
        """Stop replaying calls that read the storage, because it was written to before backward."""
        for frame in _alive(self._frames):
            if any(get_storage_id(tensor) == storage for tensor, _ in frame.list_read_tensors(with_arguments=True)):
                frame.interceptor.mutable_state.is_overwritten = True

    def __bool__(self) -> bool:
        with self._lock:
            self._forget_freed()
            if left := self._values or self._frames:
                self._newest = left[-1]
                return True
            self._storages.clear()
            self._unlooked.extend(self._values)  # those that another thread has added meanwhile
            return False


def _alive(references: Iterable[weakref.ref[T]]) -> list[T]:
    return [obj for reference in references if (obj := reference()) is not None]


def _drop_dead(references: list[weakref.ref[Any]]) -> None:
    """Remove references to freed objects; references that another thread adds at the same time stay."""
    n = len(references)
    references[:n] = [reference for reference in references[:n] if reference() is not None]


def _copy_with_geometry(tensor: Tensor) -> Tensor:
    """Copy `tensor`, with its storage if necessary, so that views of it have the same offsets and strides in the
    copy.
    """
    copy = tensor.detach().clone()
    if copy.stride() == tensor.stride() and not tensor.storage_offset():
        return copy
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return copy.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


_watching: tuple[weakref.ref[ReliedOn], ...] = ()
"""Plans in force that have had tensors to watch. Replaced, never changed: a write in any thread iterates over it."""
_undo: list[Callable[[], None]] = []
"""Functions that end the watch for writers; empty while no plan has tensors to watch."""


def _leave(stop: Callable[[], None]) -> None:
    stop()
    while _undo and not _alive(_watching):
        _undo.pop()()


def check_operands(values: Iterable[Value], reader: str) -> None:
    """Raise Overwritten if a value that a recompute is about to read was written to without autograd's knowledge."""
    for value in values:
        original = None if value.original is None else value.original()
        is_seen_by_torch = original is value.tensor and value.version != EXPOSED
        if value.is_changed and value.original is not None and not is_seen_by_torch:
            assert value.tensor is not None
            error = Overwritten(value.tensor, value.version, reader)
            if original is value.tensor:  # no object of the model's own
                original = next((own[1] for each in _alive(_watching) if (own := each.find(value.tensor))), None)
            if original is not None:
                mark(original)
                error.is_of_parameter = isinstance(original, nn.Parameter)
            raise error


def mark(tensor: Tensor) -> None:
    """Exclude `tensor` from all later recomputes, because some code writes to it between forward and backward."""
    key = id(tensor)
    _overwritten[key] = weakref.ref(tensor, lambda _: _overwritten.pop(key, None))


def is_overwritten(tensor: Tensor) -> bool:
    """Return True if recomputes must not use `tensor`, because `mark` was called for it or for a tensor in the same
    memory.
    """
    overwritten = [own for reference in _overwritten.values() if (own := reference()) is not None]
    return id(tensor) in _overwritten or any(is_same_memory(own, tensor) for own in overwritten)


@called_between_graphs
def _copy_before_update(optimizer: Optimizer, *_: Any) -> None:
    if plans := _find_plans_in_force():
        updated = {get_storage_id(p) for p in list_parameters(optimizer) if p.grad is not None}
        for relied_on in plans:
            relied_on.before_write(updated - {0}, f"{type(optimizer).__name__}.step()")


@never_compiled
def _is_spared(written: Any) -> bool:
    """Return True if no plan will read the storage of `written` again; False if one may. The check is fast, because it
    runs before each write.
    """
    if type(written) not in (torch.Tensor, nn.Parameter) or n_function_modes():
        return False
    try:
        storage = STORAGE_NUMBER(STORAGE(written))
    except NO_STORAGE:
        return False
    for reference in _watching:
        relied_on = reference()
        if relied_on is None or relied_on._newest() is None or relied_on._unlooked or storage in relied_on._storages:
            return False
    return True


def _copy_before_write(memory: Sequence[Tensor | torch.UntypedStorage], writer: str) -> bool:
    """Copy tensors in `memory`, to which `writer` is about to write, if a plan reads them again.

    In backward nothing is copied: an optimizer there updates tensors that have been read. Returns False if no plan is
    to read any tensor again.
    """
    # few Python calls, because this runs before each in-place write in forward
    in_backward_pass, gives_alias = backward_number() != -1, writer == ALIAS
    if in_backward_pass and not (gives_alias or writer == SHARES_MEMORY):
        return True
    is_any_awaited = False
    with without_function_modes():
        storages: set[int] = set()
        for owner in memory:
            try:
                storages.add(STORAGE_NUMBER(STORAGE(owner) if isinstance(owner, torch.Tensor) else owner))
            except NO_STORAGE:
                continue
        for reference in _watching:
            relied_on = reference()
            may_read = None if relied_on is None else relied_on.may_read(storages)
            is_any_awaited |= may_read is not None
            if relied_on is None or not may_read:
                continue
            if in_backward_pass or gives_alias:
                relied_on.expose(storages)
            else:
                relied_on.before_write(storages, writer)
    return is_any_awaited


def _renormalise(
    reference: weakref.ref[ReliedOn], own: Callable[..., Tensor], weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    relied_on = reference()
    if relied_on is not None and relied_on in _find_plans_in_force():
        relied_on.before_write({get_storage_id(weight)}, "an embedding's max_norm", is_habit=True)
    return own(weight, *args, **kwargs)


def _find_plans_in_force() -> list[ReliedOn]:
    """Return the `ReliedOn` of each plan that still has to read some tensors for recomputes or replays.

    Returns none while backward runs: an optimizer that steps inside backward updates only parameters that have been
    read.
    """
    return [] if in_backward() else [relied_on for relied_on in _alive(_watching) if relied_on]


if native is not None:
    native.lend(aliases=exposed_memory.n_aliases, overwritten=_overwritten, writes=vars(inplace_methods))
