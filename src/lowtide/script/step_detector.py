"""Detect the training steps of a program in this process: the model, the first call and the last update.

A step begins when the program itself calls a module with trainable parameters, in training mode and with gradients
enabled; it is over when every parameter that got a gradient has been updated, by all of its optimizers. Optimizers that
step inside backward (`register_post_accumulate_grad_hook`) update in the middle of a step, which is over at the next
call of a module; so is a step whose update is the program's own code, without an optimizer of torch. L-BFGS calls the
model many times in an update: each call is a step, which is over once the parameters have moved and the model is called
again. The model is the module whose parameters are updated; several, such as an encoder and a decoder, form one
`CompositeModel`. From the first update on, so do a frozen model and parameters outside of modules that are trained
through it, such as a prompt. If another model is updated twice without a call of the first, it replaces the first. A
`StepListener` does the work on the steps.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lowtide._torch.backward import in_backward, in_transform, is_tracing
from lowtide._torch.compiled_code import (
    called_between_graphs,
    is_compiled,
    never_compiled,
    not_compiled_alone,
)
from lowtide._torch.distributed import is_spawned
from lowtide._torch.patching import replace_function
from lowtide.errors import LowtideError
from lowtide.profiler.preconditions import check_not_in_zero, check_updates_outside
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.runtime.composite_model import CompositeModel, join_models
from lowtide.script.alternating_models import (
    PATIENCE,
    AlternatingModels,
    caller_has_other_optimizers,
    collect_held_ids,
    parameter_ids,
)
from lowtide.script.calling_code import is_registered_now
from lowtide.script.candidate_models import CandidateModels
from lowtide.script.compiled_functions import find_trained_modules, watch_compiled_functions
from lowtide.script.manual_updates import ManualUpdates
from lowtide.script.module_calls import intercept_all_calls
from lowtide.script.optimizer_updates import OptimizerUpdates
from lowtide.script.post_plan_monitor import PostPlanMonitor
from lowtide.script.prompt_tuning import PromptTuning
from lowtide.script.step_in_progress import StepInProgress
from lowtide.script.step_listener import StepListener, StopScript
from lowtide.script.training_thread import TrainingThread
from lowtide.script.unseen_training import UnseenTraining

if TYPE_CHECKING:
    from torch.optim import Optimizer


class StepDetector:
    """A detector of steps inside a `with` block, until the listener is done, and again if it needs more.

    All detected steps run in one thread: the one that enters the block, or one that starts inside it, whichever trains
    first. With `model`, only steps of that model are detected, including those in which a wrapper calls the model.

    A failure of the listener is raised as StopScript, which an `except Exception` of the program does not catch. With
    `when_failed`, that function is called, which ends the block, and the failure itself is raised: the program may
    continue without the listener.

    Within the block `nn.Module.__call__` is patched: a hook would run too late, when the call is already past the point
    at which the engine intercepts it.
    """

    def __init__(
        self, listener: StepListener, model: nn.Module | None = None, *, when_failed: Callable[[], object] | None = None
    ) -> None:
        self.listener = listener
        self.is_given, self._when_failed = model is not None, when_failed
        self.n_steps = 0
        """Number of finished steps of the model."""
        self.model: nn.Module | None = model
        """The model, if it is known."""
        self.failed: LowtideError | StopScript | None = None
        """The listener's error. A script that catches it gets it again at its next step."""
        self.updates, self.by_hand = OptimizerUpdates(), ManualUpdates()
        self._step = StepInProgress(self.updates, self.by_hand)
        self._candidates, self._prompted, self._turns = CandidateModels(), PromptTuning(), AlternatingModels()
        self._waits_until = 0
        """Number of updates up to which a listener that is done waits for another model to take turns with its own."""
        self.unseen = UnseenTraining()
        self._afterwards: PostPlanMonitor | None = None
        """Monitor that takes over when the listener is done. From then on this object holds no model."""
        self._before: weakref.ref[nn.Module] | None = None
        """First module that was called since the last step without being trained."""
        self._is_beginning = False
        """True while the listener begins a step: updates in that time are tried by a rehearsal, and undone."""
        self._depth = 0
        self._thread = TrainingThread()

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_post_hook(self._on_update_end)
        self._unwatch = contextlib.ExitStack()
        self._watch()
        return self

    def _watch(self) -> None:
        """Patch the calls of all modules and compiled functions, updates, and starts of processes."""
        self._unwatch.callback(register_optimizer_step_pre_hook(self._on_update_begin).remove)
        self._unwatch.callback(intercept_all_calls(self._call))
        started = functools.partial(functools.partial, self._starts_process)
        self._unwatch.callback(replace_function(BaseProcess, "start", started))
        if self.listener.plans_compiled:
            self._unwatch.callback(watch_compiled_functions(self))

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._hook.remove()
        self.listener.on_stop()

    def stop(self) -> None:
        """Stop detecting steps: remove all patches, and all references to the model. Repeated calls do nothing."""
        self._unwatch.close()
        if self.model is not None and (self.listener.done or self.failed is not None):
            finds_next = self.listener.plans_next and not self.is_given and self.failed is None
            known = self.updates.optimizers.values()
            self._afterwards = PostPlanMonitor(self.listener, self.model, known, finds_next=finds_next)
            self.model = None
            self._step.forget()
            self.updates.forget()

    def _resume(self, model: nn.Module | None, optimizers: Iterable[Optimizer]) -> None:
        """Detect steps again for a listener that was done: steps of `model`, or if None, of the model trained next."""
        self._afterwards, self.model = None, model
        self.updates.restart(optimizers)
        self._step.is_open = self._step.is_late = False
        self._watch()

    def end_last_step(self) -> None:
        """End the last step, which no further call of the model follows, and report the mean time of a step."""
        if self._afterwards is not None:
            self._afterwards.ended()
        if self._step.is_late and self.failed is None:
            self._end_late_step()
        elif self._step.is_open and self.failed is None:
            with self._ending_on_error():
                if self._detect_update_by_hand():
                    self._end_step()

    def _starts_process(self, plain: Callable[..., Any], process: BaseProcess) -> None:
        if not self.unseen.in_processes and self.model is None and is_spawned(process):
            self.listener.on_processes_start()  # at once, as they may train for hours
        self.unseen.in_processes = True
        plain(process)

    @not_compiled_alone
    def _call(self, plain: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self._step.is_late and not self._depth and self._thread.is_here() and not in_backward():
            self._end_late_step()
        begins = not self._depth and self._judge_call(module, (args, kwargs))
        if self._before is None and not (begins or self._step.is_open or self._depth) and self._thread.is_here():
            self._before = weakref.ref(module)
        if self._depth or not (
            begins or module in self._prompted or (torch.is_grad_enabled() and any(map(is_lazy, module.parameters())))
        ):
            if self._step.is_open and not self._depth and is_compiled(module):
                self._tell_of_call(module, (args, kwargs))
            return plain(module, *args, **kwargs)
        self._depth += 1  # also keeps modules from beginning a step when a module with lazy parameters calls them
        try:
            if begins:
                is_around = self.is_given and module is not self.model and is_compiled(module)
                self.listener.compiled = module if is_around else None
                with self._ending_on_error():
                    self._handle_outermost_call(module, (args, kwargs))
            self._tell_of_call(module, (args, kwargs))
            out = plain(module, *args, **kwargs)
            if id(module) in self._step.called and not self.updates.n:
                self.by_hand.returned(module)
            return out
        finally:
            self._depth -= 1

    @not_compiled_alone
    def calls_compiled(
        self, function: Callable[..., Any], of: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `function`, which was compiled from `of`; a step may begin with this call."""
        if self._depth or not self.listener.plans_compiled:
            return function(*args, **kwargs)
        if self._step.is_late and self._thread.is_here() and not in_backward():
            self._end_late_step()
        self._depth += 1
        try:
            if torch.is_grad_enabled() and self._thread.is_here() and not in_backward():
                for module in find_trained_modules(of, args, kwargs):
                    with self._ending_on_error():
                        check_updates_outside(of)
                    if not self._step.is_open:
                        self.listener.compiled = function
                    with self._ending_on_error():
                        self._handle_outermost_call(module, (args, kwargs))
            self._tell_of_call(function, (args, kwargs))
            return function(*args, **kwargs)
        finally:
            self._depth -= 1

    @never_compiled
    def _judge_call(self, module: nn.Module, given: Any) -> bool:
        """Return True if a backward pass of training will follow this call.

        Otherwise record signs of training whose steps can't be detected, and calls of frozen or evaluated modules.
        """
        if not torch.is_grad_enabled() or is_tracing() or any(is_lazy(p) for p in module.parameters()):
            return False
        if in_transform():
            self.unseen.in_transform |= (
                self.model is None and module.training and any(True for _ in module.parameters())
            )
            return False
        if not any(p.requires_grad for p in module.parameters()):
            return self._judge_frozen_call(module, given)
        if not module.training:
            if self.model is None:
                self._prompted.evaluated(module)
            return False
        if is_registered_now(module):
            return False
        if in_backward():
            self.unseen.in_backward_only |= self.model is None
            return False
        is_here = self._thread.is_here()
        self.unseen.in_other_thread |= not is_here
        return is_here

    def _judge_frozen_call(self, module: nn.Module, given: Any) -> bool:
        """Return True if a frozen module of the known model is called and passes gradients on to a trained prompt.

        While the trained model is unknown, record the module instead.
        """
        is_whole = type(self.model) is CompositeModel and bool(self.model.alone)
        if not (self.model is None or (is_whole and self._is_ours(module))) or not any(
            tensor.requires_grad for tensor in collect_tensors(given)
        ):
            return False
        if in_backward() or not self._thread.is_here():
            return False
        if self.model is None and any(True for _ in module.parameters()):
            self._prompted.frozen(module)
        return is_whole

    @never_compiled
    def _handle_outermost_call(self, module: nn.Module, batch: Any) -> None:
        """Handle a training call of a module by the program itself: a step may be over, and another one may begin."""
        if self.failed is not None:  # the program has caught the error and goes on
            raise StopScript from self.failed
        if self.is_given and not self._is_ours(module):
            return
        check_not_in_zero(module)
        self._thread.begin()
        if self._step.is_open:
            self._end_step_if_over()
        self._step.leave_others(set() if self.model is None else parameter_ids(self.model))
        self._turns.called(module)
        if self.listener.done:
            if self._waits_until and self.updates.n >= self._waits_until:
                self._waits_until = 0
                self.listener.on_release()
            if not self._waits_until:
                self.stop()
            return
        self._choose_model(module)
        if not self._step.is_open and not self._is_ours(module):
            self._note_other_call(module)
        if self._step.is_open:
            self.listener.on_further_call(batch)
        elif self._is_ours(module) and not self._turns.are_in_step:
            self._begin_step(batch)
        if self._step.is_open:
            self._step.called[id(module)] = module
            if not self.updates.n:
                self.by_hand.called(module)

    def _end_step_if_over(self) -> None:
        """End the open step, before the next call, if its update is over."""
        if self._all_stepped() or self._detect_update_by_hand():
            self._end_step()  # a parameter had a gradient, but is in no optimizer
        elif (search := self.updates.search()) is not None and search.detect_move():
            self._step.stepped(search.optimizer)
            self._end_step()

    def _choose_model(self, module: nn.Module) -> None:
        """Choose the called module as the model if there is none yet, or if the module is a better choice."""
        if self.model is None:
            self.model = module
            self._prompted.forget()
        elif not (self.is_given or self._is_ours(module)) and self.listener.is_abandoned(self.model, module):
            self.updates.restart(())
            self._step.forget()
            self._replace(module)
        elif not self.is_given and self._is_only_guessed() and _count_elements(module) > _count_elements(self.model):
            self._replace(module)  # the first call may have been a trial on a small input

    def _begin_step(self, batch: Any) -> None:
        """Begin a step of the model, and report it to the listener."""
        assert self.model is not None
        self._candidates.forget()
        before = None if self._before is None else self._before()
        if before is not None and not self._is_ours(before) and any(True for _ in before.parameters()):
            self.listener.on_earlier_call(before)
        if (search := self.updates.search()) is not None:
            self.updates.add(search.optimizer)
        self._is_beginning = True
        try:
            self.listener.on_step_begin(self.model, batch, tuple(self.updates.optimizers.values()))
        finally:
            self._is_beginning = False
        self._step.is_open = True

    @never_compiled
    def _tell_of_call(self, called: Callable[..., Any], batch: Any) -> None:
        """Report a call inside a step to the listener, if backward may go through the call."""
        is_ours = self._step.is_open and self.failed is None and self._thread.is_here()
        if is_ours and torch.is_grad_enabled() and not in_backward():
            self.listener.on_inner_call(called, batch)

    def _note_other_call(self, module: nn.Module) -> None:
        """Record a call of a module outside the model. If the module is trained for two steps, it replaces the
        model.
        """
        self._candidates.called(module)
        trained, optimizers = self._candidates.trained()
        if trained:
            assert self.model is not None
            self._candidates.leave(self.model)
            self.updates.restart(optimizers)
            self._give_up(join_models(trained))

    def _detect_update_by_hand(self) -> bool:
        """Return True if the model's parameters were updated without an optimizer of torch."""
        if self.updates.n or self.updates.are_in_progress or self.model is None:
            return False
        return self.listener.detect_update(self.model) or self.by_hand.detect_update(self._step.called.values())

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Return True if the optimizer steps in a thread that is not observed, and updates no parameter of the
        model.
        """
        if self._thread.is_here() or in_backward():
            return False
        return self.model is None or not collect_held_ids(optimizer) & parameter_ids(self.model)

    @called_between_graphs
    def _on_update_begin(self, optimizer: Optimizer, *_: Any) -> None:
        if self._afterwards is None and not self._is_elsewhere(optimizer):
            self.updates.begin(optimizer)

    @called_between_graphs
    def _on_update_end(self, optimizer: Optimizer, *_: Any) -> None:
        if self._afterwards is not None:
            self._on_later_update(self._afterwards, optimizer)
            return
        if self._is_beginning or self._is_elsewhere(optimizer):
            return
        self._turns.count_update()
        self.updates.end(optimizer)
        if self.model is None and (model := self._prompted.updated(optimizer)) is not None:
            self.model = model
            self._prompted.forget()
            with self._ending_on_error():
                self.listener.on_model_found(model, (optimizer,))
        held = collect_held_ids(optimizer)
        if self.model is not None and not held & parameter_ids(self.model):
            self._turns.note_others_update(held)
        elif not self.is_given and self.listener.done and (others := self._turns.find_updated_others()):
            self._takes_turns(others)
        if self.listener.done:
            if self._waits_until and self.model is not None and held & parameter_ids(self.model):
                self._waits_until = 0 if self.listener.on_later_update() else self._waits_until
            return
        if not self._step.is_open:
            self._candidates.updated(optimizer)
        if not self._step.is_open or self.failed is not None:
            return
        self._step.stepped(optimizer)
        if in_backward():  # more gradients will arrive
            self._step.is_late = True
        elif not self._step.has_unused_gradients() and self._all_stepped():
            with self._ending_on_error():
                self._end_step()

    def _on_later_update(self, monitor: PostPlanMonitor, optimizer: Optimizer) -> None:
        """Count an update, and detect steps again if more are needed. This runs in every step, so it makes few
        calls.
        """
        if weakref.ref(optimizer) not in monitor.known:
            if self._is_elsewhere(optimizer):
                return
            if monitor.updated(optimizer):
                self._start_over(optimizer)
                return
        else:
            monitor.n_others = 0
        self.updates.n += 1
        self.updates.last[id(optimizer)] = self.updates.n
        if monitor.is_timing:
            monitor.count_time(optimizer)
        if not monitor.n_others and self.listener.on_later_update() and (model := monitor.model()) is not None:
            self._resume(model, monitor.optimizers())

    def _start_over(self, optimizer: Optimizer) -> None:
        """Detect the steps of the model that `optimizer` updates, from the next call on."""
        self.listener.on_next_model()
        self.n_steps = self._waits_until = 0
        self._candidates, self._turns = CandidateModels(), AlternatingModels()
        self._resume(None, [optimizer])

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """End training if this block raises, and store the error in `failed`.

        A loop that continues after each Exception would meet the error again and again, and train nothing. So
        StopScript, which is no Exception, ends the script.
        """
        try:
            yield
        except (LowtideError, StopScript) as error:
            traceback.clear_frames(error.__traceback__)  # a frame that refers to the error holds those of the loop
            if self.failed is None:
                where = f"after update {self.updates.n}" if self.updates.n else "before any optimizer stepped"
                error.add_note(f"{'Training' if self._when_failed else 'The script'} was ended {where}.")
                self.failed = error
            if self._when_failed is not None:
                self._when_failed()  # it may remove hooks, because those after this one are skipped when it raises
                raise
            raise StopScript from self.failed

    def _end_late_step(self) -> None:
        """End a step whose updates ran inside backward, if all its gradients were used.

        Some optimizers may not have stepped: each parameter may have its own, and some parameters get no gradient.
        """
        self._step.is_late = False
        if self._step.is_open and (self._all_stepped() or not self._step.has_unused_gradients()):
            with self._ending_on_error():
                self._end_step()

    def _end_step(self) -> None:
        self._before = None
        self.n_steps += 1
        trained = self._step.trained()
        self._step.end()
        assert self.model is not None
        if not all(self._is_ours(module) for module in trained):
            self._give_up(join_models(trained))
        elif not self.is_given and (others := self._turns.find_updated_others()):
            self._takes_turns(others)
        else:
            self.listener.on_step_end(self.model)
            if self.listener.done:
                if not self.is_given and caller_has_other_optimizers(self.model):
                    self._waits_until = self.updates.n + PATIENCE
                else:
                    self.listener.on_release()

    def _takes_turns(self, others: Sequence[nn.Module]) -> None:
        """Join the model and `others`, which take turns, into one model."""
        assert self.model is not None
        parts = [*self.model.children()] if type(self.model) is CompositeModel else [self.model]
        self._turns.join([*parts, *others])
        self._give_up(join_models([*parts, *others]))

    def _give_up(self, other: nn.Module) -> None:
        assert self.model is not None
        given_up, self.model = self.model, other
        self._turns.begin()
        self.n_steps = self._waits_until = 0
        self.listener.on_model_replaced(given_up)

    def _replace(self, other: nn.Module) -> None:
        """Switch to another model, whose call begins a step."""
        self._give_up(other)
        self._step.is_open = False

    def _is_only_guessed(self) -> bool:
        """Return True if no optimizer has updated the model so far."""
        assert self.model is not None
        return not self.updates.are_of(parameter_ids(self.model))

    def _is_ours(self, module: nn.Module) -> bool:
        """Return True for the model, one of its parts, or a wrapper of a given model."""
        if self.model is None:
            return False
        if self.is_given and any(self.model is part for part in module.modules()):
            return True
        return any(module is ours for ours in self.model.modules())

    def _all_stepped(self) -> bool:
        """Return True if every optimizer that is known to update the model has stepped in this step."""
        assert self.model is not None
        return self._step.is_complete(self.model)


def _count_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
