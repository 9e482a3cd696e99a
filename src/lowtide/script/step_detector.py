"""Finds the training steps of a program that runs in this process: which model, from which call to which update.

A step begins when a module with trainable parameters is called by nobody else's forward, in training mode and with
gradients on; it is over when every parameter that got a gradient has been updated, by all optimizers there are for it.
Optimizers that step inside of backward (`register_post_accumulate_grad_hook`) update it in the middle of a step: that
is over when a module is called next. L-BFGS calls the model many times in an update: each of these is a step, and over
when the parameters have moved and the model is called again. The model is the module whose parameters are updated;
several, as an encoder and a decoder, are `CompositeModel` of one. So are, from the first update on, a frozen model and
parameters of no module that are trained through it, as a prompt is. Where another model is updated twice and the one is
not called meanwhile, the other is it from there on. What is done with the steps is up to the `StepListener`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide._torch.backward import in_backward, in_transform, is_tracing
from lowtide._torch.compiled_code import never_compiled, not_compiled_alone
from lowtide._torch.patching import Make, stand_in
from lowtide.errors import LowtideError, RehearsalError
from lowtide.runtime.class_calls import class_of_call, classes_of_calls
from lowtide.runtime.fingerprint import tensors_in
from lowtide.script.alternating_models import PATIENCE, AlternatingModels, held_by, ids, others_at_hand
from lowtide.script.candidate_models import CandidateModels
from lowtide.script.composite_model import CompositeModel, whole
from lowtide.script.line_search import Search
from lowtide.script.manual_updates import ManualUpdates
from lowtide.script.post_plan_monitor import PostPlanMonitor
from lowtide.script.prompt_tuning import PromptTuning
from lowtide.script.step_listener import Enough, StepListener

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Steps:
    """Watches for steps inside a `with` block, until the crew is done, and again where it wants to see more.

    They are those of one thread: the one that enters the block, or one that starts inside of it, whichever trains
    first. With `model` they are the steps of that model alone, also where it is called by a wrapper of it.

    A failure of the crew is raised as Enough, which no `except Exception` of the program's stops. With `when_failed` it
    is raised itself, after that was called, which ends the block: the program may go on without the crew.

    Something stands in for `nn.Module.__call__` meanwhile: a hook would come too late, when the call is already past
    the place where the engine gets in.
    """

    def __init__(
        self, crew: StepListener, model: nn.Module | None = None, *, when_failed: Callable[[], object] | None = None
    ) -> None:
        self.crew = crew
        self._is_given, self._when_failed = model is not None, when_failed
        self.n_updates = 0
        """Updates by optimizers so far."""
        self.model: nn.Module | None = model
        """The model, as far as is known."""
        self.failed: LowtideError | Enough | None = None
        """What the crew raised. A script that catches it meets it again at its next step."""
        self._own_calls: set[type] = set()
        """Classes whose `__call__` is watched as well."""
        self._called: dict[int, nn.Module] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._stepped: dict[int, Optimizer] = {}
        self._updating: dict[int, Search] = {}
        """Optimizers in the midst of an update, which may call the model."""
        self._aside, self._prompted, self._turns, self.by_hand = (
            CandidateModels(),
            PromptTuning(),
            AlternatingModels(),
            ManualUpdates(),
        )
        self._waits_until = 0
        """Number of updates up to which a crew that is done waits for another model to take turns with its own."""
        self.in_other_thread = False
        """Whether a model was trained in a thread that was there before, and is not watched."""
        self.in_backward_only = False
        """Whether a model was called with gradients on in backward passes, and else with gradients off."""
        self.in_transform = False
        """Whether a model was called in transforms of torch.func."""
        self.started_processes = False
        """Whether the script started processes, in which nothing is watched."""
        self._afterwards: PostPlanMonitor | None = None
        """Who looks on when the crew is done: nothing is held here any longer."""
        self._before: weakref.ref[nn.Module] | None = None
        """What was called first since the last step, without being trained."""
        self._is_open = False
        self._is_beginning = False
        """Whether the crew is told of a step: updates meanwhile are tried by a rehearsal, and undone."""
        self._is_late = False
        """Whether updates were made inside of backward: the step may be over as soon as that is."""
        self._depth = 0
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        """The one that trains, once it does."""
        self._other_threads = weakref.WeakSet(t for t in threading.enumerate() if t is not threading.current_thread())

    def __enter__(self) -> Self:
        self._hooks = (
            register_optimizer_step_pre_hook(self._begins_update),
            register_optimizer_step_post_hook(self._updates),
        )
        self._unwatch = contextlib.ExitStack()
        self._watch()
        return self

    def _watch(self) -> None:
        """Have calls of all modules come by, those included whose class has a `__call__` of its own."""
        told = functools.partial(functools.partial, self._call)
        self._unwatch.callback(stand_in(nn.Module, "__call__", told))
        self._unwatch.callback(stand_in(nn.Module, "__init__", functools.partial(functools.partial, self._made, told)))
        started = functools.partial(functools.partial, self._starts_process)
        self._unwatch.callback(stand_in(BaseProcess, "start", started))
        for kind in classes_of_calls():
            self._watch_class(kind, told)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for hook in self._hooks:
            hook.remove()
        self.crew.leaves()

    def stop(self) -> None:
        """Watch no calls any longer, and hold nothing. May be called again."""
        self._unwatch.close()
        self._own_calls.clear()
        if self.model is not None and (self.crew.done or self.failed is not None):
            self._afterwards = PostPlanMonitor(self.crew, self.model, self._optimizers.values())
            self.model = None
            self._called.clear()
            self._optimizers.clear()
            self._stepped.clear()
            self._updating.clear()

    def _resume(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Watch again: the crew wants to see more steps of the model that it was done with."""
        self._afterwards, self.model = None, model
        self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self._is_open = self._is_late = False
        self._watch()

    def ended(self) -> None:
        """The script has ended: so has a step that waited for the next call."""
        if self._is_late and self.failed is None:
            self._close_late()
        elif self._is_open and self.failed is None and self._is_updated_by_hand():
            with self._noting():
                self._close()

    def _starts_process(self, plain: Callable[..., Any], process: BaseProcess) -> None:
        self.started_processes = True
        plain(process)

    def _made(self, told: Make, plain: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """A module is made: calls of its class are watched, also where they do not come to torch's `__call__`."""
        if (kind := class_of_call(module)) is not None:
            self._watch_class(kind, told)
        return plain(module, *args, **kwargs)

    def _watch_class(self, kind: type, told: Make) -> None:
        if kind not in self._own_calls:
            self._own_calls.add(kind)
            self._unwatch.callback(stand_in(kind, "__call__", told))

    @not_compiled_alone
    def _call(self, plain: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self._is_late and not self._depth and self._is_here() and not in_backward():
            self._close_late()
        begins = not self._depth and self._begins_training(module, (args, kwargs))
        if self._before is None and not (begins or self._is_open or self._depth) and self._is_here():
            self._before = weakref.ref(module)
        if self._depth or not (begins or module in self._prompted or any(map(is_lazy, module.parameters()))):
            return plain(module, *args, **kwargs)
        self._depth += 1  # nor does any module begin a step that is called by one with parameters yet to be made
        try:
            if begins:
                with self._noting():
                    self._called_by_nobody(module, (args, kwargs))
            return plain(module, *args, **kwargs)
        finally:
            self._depth -= 1

    @never_compiled
    def _begins_training(self, module: nn.Module, given: Any) -> bool:
        """Whether this call is one that a backward of training will follow."""
        if not torch.is_grad_enabled() or is_tracing() or any(is_lazy(p) for p in module.parameters()):
            return False
        if in_transform():
            self.in_transform |= self.model is None and module.training and any(True for _ in module.parameters())
            return False
        if not any(p.requires_grad for p in module.parameters()):
            return self._begins_frozen(module, given)
        if not module.training:
            if self.model is None:
                self._prompted.evaluated(module)
            return False
        if in_backward():
            self.in_backward_only |= self.model is None
            return False
        is_here = self._is_here()
        self.in_other_thread |= not is_here
        return is_here

    def _begins_frozen(self, module: nn.Module, given: Any) -> bool:
        """The same of a module without anything to train. It may be one that a prompt goes through."""
        is_whole = type(self.model) is CompositeModel and bool(self.model.alone)
        if not (self.model is None or (is_whole and self._is_ours(module))) or not any(
            tensor.requires_grad for tensor in tensors_in(given)
        ):
            return False
        if in_backward() or not self._is_here():
            return False
        if self.model is None and any(True for _ in module.parameters()):
            self._prompted.frozen(module)
        return is_whole

    @never_compiled
    def _is_here(self) -> bool:
        """Return True if this is the thread that is watched, or may be."""
        here = threading.current_thread()
        if os.getpid() != self._process:
            return False
        return here is self._thread if self._thread is not None else here not in self._other_threads

    @never_compiled
    def _called_by_nobody(self, module: nn.Module, batch: Any) -> None:
        if self.failed is not None:  # somebody caught that all the same
            raise Enough from self.failed
        if self._is_given and not self._is_ours(module):
            return
        self._thread = threading.current_thread()
        if self._is_open and (self._all_stepped() or self._is_updated_by_hand()):
            self._close()  # a parameter had a gradient, and no optimizer has it
        elif self._is_open and (search := self._search()) is not None and search.has_moved():
            self._stepped[id(search.optimizer)] = search.optimizer
            self._close()
        mine = set() if self.model is None else ids(self.model.parameters())
        self._stepped = {key: o for key, o in self._stepped.items() if mine & held_by(o)}  # the others' steps are over
        self._turns.called(module)
        if self.crew.done:
            if self._waits_until and self.n_updates >= self._waits_until:
                self._waits_until = 0
                self.crew.lets_go()
            if not self._waits_until:
                self.stop()
            return
        if self.model is None:
            self.model = module
            self._prompted.forget()
        elif not self._is_given and self._is_only_guessed() and _n_elements(module) > _n_elements(self.model):
            self._give_up(module)  # the first call may have been to try something small
            self._is_open = False
        if not self.n_updates and not self._updating and module is self.model:
            self._look_for_updates_by_hand(module)
        if not self._is_open and not self._is_ours(module):
            self._called_aside(module)
        if self._is_open:
            self.crew.goes_on(batch)
        elif self._is_ours(module):
            self._aside.forget()
            before = None if self._before is None else self._before()
            if before is not None and not self._is_ours(before) and any(True for _ in before.parameters()):
                self.crew.precedes(before)
            if (search := self._search()) is not None:
                self._optimizers[id(search.optimizer)] = search.optimizer
            self._is_beginning = True
            try:
                self.crew.begins(self.model, batch, tuple(self._optimizers.values()))
            finally:
                self._is_beginning = False
            self._is_open = True
        if self._is_open:
            self._called[id(module)] = module

    def _called_aside(self, module: nn.Module) -> None:
        """Another module is called: the model's place is its own if it was trained for two steps by now."""
        self._aside.called(module)
        trained, optimizers = self._aside.trained()
        if trained:
            assert self.model is not None
            self._aside.leave(self.model)
            self._optimizers = {id(optimizer): optimizer for optimizer in optimizers}  # the others' state may go
            self._give_up(whole(trained))

    def _is_updated_by_hand(self) -> bool:
        """Whether the model's parameters were updated, and by no optimizer of torch."""
        return not self.n_updates and self.model is not None and self.crew.is_updated(self.model)

    def _look_for_updates_by_hand(self, model: nn.Module) -> None:
        """Refuse what updates it by itself: its first step would never end, and be recorded all the time."""
        try:
            self.by_hand.called(model)
        except RehearsalError as why:
            self.crew.loses_track(why)

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer steps in a thread that is not watched, and updates nothing of the model."""
        if self._is_here() or in_backward():
            return False
        return self.model is None or not held_by(optimizer) & ids(self.model.parameters())

    def _begins_update(self, optimizer: Optimizer, *_: Any) -> None:
        if self._afterwards is None and not self._is_elsewhere(optimizer):
            self._updating[id(optimizer)] = Search(optimizer)

    def _search(self) -> Search | None:
        """The search that the model is called in, if any: each of its evaluations is a step."""
        return next((search for search in self._updating.values() if search.evaluates_often), None)

    def _updates(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_beginning or self._is_elsewhere(optimizer):
            return
        self.n_updates += 1
        self._updating.pop(id(optimizer), None)
        if self._afterwards is not None:
            self._afterwards.updated(optimizer)
            if self.crew.wants_more() and (model := self._afterwards.model()) is not None:
                self._resume(model, self._afterwards.optimizers())
            return
        self._optimizers[id(optimizer)] = optimizer
        if self.model is None and (found := self._prompted.updated(optimizer)) is not None:
            self.model = found
            self._prompted.forget()
            with self._noting():
                self.crew.finds(found, (optimizer,))
        held = held_by(optimizer)
        if self.model is not None and not held & ids(self.model.parameters()):
            self._turns.others_updated(held)
        elif not self._is_given and self.crew.done and (others := self._turns.model_updated()):
            self._takes_turns(others)
        if self.crew.done:
            return
        if not self._is_open:
            self._aside.updated(optimizer)
        if not self._is_open or self.failed is not None:
            return
        self._stepped[id(optimizer)] = optimizer
        if in_backward():  # the gradients that are there are not all
            self._is_late = True
        elif not self._gradients() - self._updated() and self._all_stepped():
            with self._noting():
                self._close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """End training where anything is raised in this block: `failed` is what. A loop that goes on after each
        Exception would meet it again and again, and train nothing, so that of a script is ended by Enough.
        """
        try:
            yield
        except (LowtideError, Enough) as error:
            if self.failed is None:
                where = f"after update {self.n_updates}" if self.n_updates else "before any optimizer stepped"
                error.add_note(f"{'Training' if self._when_failed else 'The script'} was ended {where}.")
                self.failed = error
            if self._when_failed is not None:  # hooks may be removed here: those that follow are not called any more
                self._when_failed()
                raise
            raise Enough from self.failed

    def _close_late(self) -> None:
        """Backward is over, inside of which there were updates: so is the step if it has no gradients left.

        Not all optimizers need have stepped. There may be one for each parameter, and not each gets a gradient.
        """
        self._is_late = False
        if self._is_open and (self._all_stepped() or not self._gradients() - self._updated()):
            with self._noting():
                self._close()

    def _close(self) -> None:
        self._is_open = self._is_late = False
        self._before = None
        updated = self._updated()
        trained = [module for module in self._called.values() if updated & ids(module.parameters())]
        self._called.clear()
        self._stepped.clear()
        assert self.model is not None
        if not all(self._is_ours(module) for module in trained):
            self._give_up(whole(trained))
        elif not self._is_given and (others := self._turns.model_updated()):
            self._takes_turns(others)
        else:
            self.crew.ends(self.model)
            if self.crew.done:
                if not self._is_given and others_at_hand(self.model):
                    self._waits_until = self.n_updates + PATIENCE
                else:
                    self.crew.lets_go()

    def _takes_turns(self, others: Sequence[nn.Module]) -> None:
        """These and the model are parts of one from here on."""
        assert self.model is not None
        parts = self.model.children() if type(self.model) is CompositeModel else (self.model,)
        self._give_up(whole([*parts, *others]))

    def _give_up(self, other: nn.Module) -> None:
        assert self.model is not None
        given_up, self.model = self.model, other
        self._turns.begin()
        self._waits_until = 0
        self.crew.gives_up(given_up)

    def _is_only_guessed(self) -> bool:
        """Whether nothing has updated the model so far."""
        assert self.model is not None
        mine = ids(self.model.parameters())
        return not any(mine & held_by(optimizer) for optimizer in self._optimizers.values())

    def _is_ours(self, module: nn.Module) -> bool:
        """Return True if it is the model or one of its parts; or a wrapper of the model that was given."""
        if self.model is None:
            return False
        if self._is_given and any(self.model is part for part in module.modules()):
            return True
        return any(module is ours for ours in self.model.modules())

    def _gradients(self) -> set[int]:
        """Parameters that have one, of the modules that were called in this step."""
        return {id(p) for module in self._called.values() for p in module.parameters() if p.grad is not None}

    def _updated(self) -> set[int]:
        return {p for optimizer in self._stepped.values() for p in held_by(optimizer)}

    def _all_stepped(self) -> bool:
        """Whether an update has been in this step, by each optimizer that is known to update the model."""
        assert self.model is not None
        mine = ids(self.model.parameters())
        known = [key for key, optimizer in self._optimizers.items() if mine & held_by(optimizer)]
        return bool(self._stepped) and all(key in self._stepped for key in known)


def _n_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
