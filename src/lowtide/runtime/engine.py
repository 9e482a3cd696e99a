"""Execution of a plan on a model: the model's calls run with a pair of saved-tensor hooks.

Interceptors in the modules report which call of which module is running; a plan addresses a saved tensor by that call
and by the tensor's ordinal in the call. A `SavedTensorPacker` keeps, recomputes or replays the tensor. Once runs have
shown which tensors the hooks need to see (`LearntSlots`), the hooks are pushed only around calls that save them.

All state of a forward pass is in one `ForwardPass`, so nothing is left over when the pass ends, also by an exception.
Its `scope` is the module call in progress; its `frame` is the innermost call in progress that will be replayed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from lowtide._torch.backward import in_backward, in_forward_mode, in_transform
from lowtide._torch.modes import off_in_transforms, saved_tensor_hooks
from lowtide._torch.modules import CALL
from lowtide._torch.privateuse1 import without_overrides
from lowtide.errors import LowtideError
from lowtide.runtime import saved_values as values
from lowtide.runtime.bypassed_calls import IN_TRANSFORM, describe_hooked_calls
from lowtide.runtime.call_interceptor import CallInterceptor, OuterInterceptor
from lowtide.runtime.call_shapes import count_elements_in
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.forward_pass import CallHandler, ForwardPass, paused, pausing
from lowtide.runtime.inplace_gradients import InPlacePermission, check_writable
from lowtide.runtime.learnt_slots import LearntSlots
from lowtide.runtime.model_interceptors import ModelInterceptors
from lowtide.runtime.saved_tensor_packer import SavedTensorPacker
from lowtide.runtime.saved_values import unpack
from lowtide.utils import interrupts as _interrupts

if TYPE_CHECKING:
    from lowtide.runtime.plan_table import Actions


class Engine:
    """Executor of a plan on one model by saved-tensor hooks. With several plans, each run of the model uses one."""

    is_measured: ClassVar[bool] = False
    """True for an engine under which a step is measured: plans on other models are ignored meanwhile."""

    def __init__(
        self,
        model: nn.Module,
        *actions: Mapping[str, dict[int, Actions]],
        in_place: Sequence[Mapping[str, int]] = (),
        packer: SavedTensorPacker | None = None,
    ) -> None:
        """Prepare an engine for one plan, or for several, of which `choose` selects one for each run.

        Args:
            model: The model, which is changed by `install` only.
            actions: For each plan, the decisions by module path and call number.
            in_place: For each plan, the names of autograd nodes that write their result over the incoming gradient,
                each with the smallest size in bytes of such a gradient.
            packer: The object that carries out the decisions on saved tensors; None for a new `SavedTensorPacker`.
        """
        self.model = model
        self.packer = SavedTensorPacker(model) if packer is None else packer
        self.here, self.messages, self.relied_on = self.packer.here, self.packer.messages, self.packer.relied_on
        self.tables, self.in_place = actions, in_place or [{} for _ in actions]
        self.excluded_modules: frozenset[str] = frozenset()
        """Paths of modules that save different tensors in each step, which autograd keeps as without a plan."""
        self.n_runs = 0
        """Number of calls of the model, or of its parts on their own, after which a training backward may follow."""
        self.n_runs_in_eval_mode = 0
        """Number of such calls that ran as without a plan because the model was in eval mode."""
        self.learning = LearntSlots(len(actions))
        self._writing: InPlacePermission | None = None
        """The permission to write gradients in place, while it is in force."""
        self._thread: int | None = None
        """The thread of the run in progress."""
        self.interceptors = ModelInterceptors()
        self._n_calls: dict[tuple[int, CallInterceptor], tuple[int, dict[CallInterceptor, int]]] = {}
        """By plan and module, the first run that began with a call of that module: the elements of its inputs, and its
        number of calls of each module.
        """

    def has_room(self, plan: int, n_elements: int) -> bool:
        """Return True if a run on inputs of `n_elements` keeps to the budget of `plan` with all saved tensors kept."""
        return False

    def decide_further(self, interceptor: CallInterceptor, plan: int, number: int) -> Actions:
        """Return the decisions for call `number` of a module, for which the plan has none: those for its last call.

        This happens if a step calls the module more often than the first step under the plan did. A message reports it.
        """
        self.messages.say_different(
            "this step calls modules more often than the first step under the plan did: further calls get the last "
            "decision for their module, and the peak may be above the budget",
            "Rehearse the step with the most calls.",
        )
        decided = interceptor.actions[plan]
        last = max(decided)
        path = f"{interceptor.path}#"
        return decided.setdefault(number, decided[last].moved(f"{path}{last}", f"{path}{number}"))

    # --- the calls

    @property
    def does_anything(self) -> bool:
        """Return True if at least one of the engine's plans decides anything."""
        return any(self.tables) or any(self.in_place)

    def choose(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the index of the plan to use in a run of the model that begins with this call."""
        return 0

    def keeps_all(self, plan: int) -> bool:
        """Return True if the plan changes nothing about saved tensors, so that no hooks are needed."""
        return False

    def begin(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the model, or of a part that the step calls directly; return the call's result.

        The call runs under a plan if a training backward may follow, and otherwise as without a plan.
        """
        if not torch.is_grad_enabled() or in_backward():
            with without_overrides():  # a call inside backward, such as a recompute of torch.utils.checkpoint
                return interceptor.inner(*args, **kwargs)
        if not self.model.training:
            self.n_runs_in_eval_mode += 1
            return interceptor.inner(*args, **kwargs)
        if in_forward_mode() and not in_transform():  # forward-mode AD ends the dual level before a replay would run
            with self.handling(self.interceptors.passthrough):
                return interceptor.inner(*args, **kwargs)
        self.n_runs += 1
        _interrupts.install_handler()
        if in_transform():  # transforms allow no saved-tensor hooks: run as without a plan
            self.packer.bypassed = IN_TRANSFORM
            if self.does_anything:
                self.messages.say(
                    f"{interceptor} was called inside a transform of torch.func (grad, vmap, ...): the plan does "
                    "nothing there."
                )
            with self.handling(self.interceptors.passthrough):
                return interceptor.inner(*args, **kwargs)
        hooks = saved_tensor_hooks() or (None if paused.pack is None else (paused.pack, unpack))
        if hooks is not None:
            self.packer.bypassed = describe_hooked_calls(hooks[0])
            if self.does_anything and hooks[1] is not unpack:  # hooks that are not those of a plan on an outer model
                self.messages.say(
                    f"{interceptor} was called inside other saved-tensor hooks (torch.utils.checkpoint or "
                    "saved_tensors_hooks around it). Those take precedence: the plan does nothing there."
                )
            with self.handling(self.interceptors.passthrough):
                return interceptor.inner(*args, **kwargs)
        plan = self.choose(interceptor, args, kwargs)
        writing, least = self._writing, self.in_place[plan]
        if writing is None or self.is_measured or (not least and writing.least is least):
            return self.run(plan, interceptor, args, kwargs)
        with writing.of_run(least) as outputs:
            outputs.append(self.run(plan, interceptor, args, kwargs))
            return outputs[0]

    def run(self, plan: int, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model, or a part of it, with hooks if `plan` changes anything about saved tensors."""
        if self.keeps_all(plan):
            return self._run_as_without_plan(interceptor, args, kwargs)
        is_probed = values.find_observer(self) is not None
        if self.packer.learns_again and not is_probed:
            self.packer.learns_again = False
            self.learning.learn_again(plan)
        needed = None if is_probed else self.learning.needed(plan)
        learns = self.learning.is_possible and not is_probed and not self.packer.builder.owners.sharded
        run = ForwardPass(self, plan, needed, learns=learns)
        n_elements = count_elements_in(args, kwargs)
        run.has_room = interceptor.module is self.model and self.has_room(plan, n_elements)
        first = self._n_calls.get((plan, interceptor))
        if first is not None and first[0] == n_elements:
            run.n_calls = first[1]
        alone = self._claim_thread(interceptor)
        inside = self.interceptors.inside.staying(None if needed is None else needed.unneeded)
        with off_in_transforms(unpack, self.without_plan), self.handling(run), alone, inside, pausing(run.pack):
            if needed is None:
                run.switch_hooks(on=True)
            try:
                result = run.call(interceptor, args, kwargs)
            finally:
                run.offloads.close()
                if run.has_hooks:
                    run.switch_hooks(on=False)
        if first is None and not self.packer.draws:
            self._n_calls[plan, interceptor] = n_elements, dict(run.times)
        self.learning.add(run)
        return result

    def _run_as_without_plan(self, interceptor: CallInterceptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here, inside = self.here, self.interceptors.inside
        before, here.handler = here.handler, self.interceptors.passthrough
        try:
            inside.take_out()
            return interceptor.inner(*args, **kwargs)
        finally:
            inside.put_in()
            here.handler = before

    def without_plan(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which calls of modules in this thread run as without a plan."""
        return self.handling(self.interceptors.passthrough)

    @contextlib.contextmanager
    def _claim_thread(self, interceptor: CallInterceptor) -> Iterator[None]:
        """Mark this thread, inside the block, as the one that runs the model.

        Raises LowtideError if another thread runs the model and the plan replays calls: a replay restores state of the
        whole process.
        """
        before, me = self._thread, threading.get_ident()
        if before not in (None, me) and any(interceptor.replays for interceptor in self.interceptors.all):
            raise LowtideError(
                f"{interceptor} is called in two threads at once, and the plan replays parts of the model: a replay "
                "restores random number generators and hooks, which belong to the whole process. Call the model in one "
                "thread at a time, or fit with a larger budget, for which nothing is replayed."
            )
        self._thread = me
        try:
            yield
        finally:
            self._thread = before

    @contextlib.contextmanager
    def handling(self, handler: CallHandler) -> Iterator[None]:
        """Report module calls in this thread to `handler` inside the block."""
        before, self.here.handler = self.here.handler, handler
        try:
            yield
        finally:
            self.here.handler = before

    def install(self) -> None:
        """Install an interceptor in every module, until `remove`. Raises LowtideError if a plan is already in force."""
        front = self.model.__dict__.get(CALL)
        while isinstance(front, CallInterceptor | OuterInterceptor):
            if isinstance(front, CallInterceptor) and front.engine.model is self.model:
                raise LowtideError(
                    f"there is a plan in force on this {type(self.model).__name__} already: remove it first with "
                    "lowtide.remove(model)."
                )
            front = front.before
        if self.is_measured or any(self.in_place):
            device = find_device(self.model).type
            writing = InPlacePermission(device, self.report_write_in_place, alone=self.is_measured)
            if nodes := {node for each in self.in_place for node in each}:
                check_writable(device, nodes)
            if self.is_measured:
                writing.of_all(self.in_place[0])
            self._writing = writing
        self.relied_on.watch()
        self.learning.forget(len(self.tables))
        self._n_calls.clear()
        self.interceptors.install(self)

    def report_write_in_place(self, node: str, n_bytes: int) -> None:
        """Notify the observer, if any, that a node named `node` will write its result over its incoming gradient."""
        if (observer := values.find_observer(self)) is not None:
            observer.on_write_in_place(node, n_bytes)

    def remove(self) -> None:
        """Remove every interceptor. Handles that a running backward still holds keep working."""
        if self._writing is not None:
            self._writing.remove()
            self._writing = None
        self.relied_on.leave()
        self.interceptors.remove()
