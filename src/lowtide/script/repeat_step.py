"""Repeat a step that ran out of memory, once, under the plan with the smallest peak.

A script can't be rewound, so the repeated part is the one that runs between the script's own lines: the call of the
model, or the backward pass.

- **The call.** Random numbers, buffers and attributes are restored, then the model is called again.
- **The backward pass.** Autograd frees the graph while it runs, so the graph can't be used again. The model is called
  again from the state before its call, as a replayed block is, and backward enters the new graph with the same output
  gradients as the failed one. Gradients that had already reached `.grad` stay; only the missing ones are added.

A step is not repeated if that might give other bits than a run with enough memory; the error says why. Debts: a loss
outside the model, the update and data loading run in the script's own lines and are not repeated.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from lowtide._torch.autograd_graph import find_nodes_behind
from lowtide._torch.backward import ENGINE, in_backward, in_transform
from lowtide._torch.compiled_code import not_compiled_alone
from lowtide._torch.device_timing import accelerator_in_use
from lowtide._torch.patching import replace_function
from lowtide._torch.privateuse1 import without_overrides
from lowtide._torch.tensors import is_plain
from lowtide.api.release import release
from lowtide.diagnostics.oom.explain_oom import explain_oom
from lowtide.diagnostics.oom.explanation import explain
from lowtide.errors import LowtideError
from lowtide.levers import find_lever
from lowtide.levers.backward_entry import find_output_tensors, replace_tensors
from lowtide.runtime import module_hooks as hooks
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.runtime.call_context import CallContext, MutableState, StateAtCall
from lowtide.runtime.call_interceptor import OuterInterceptor
from lowtide.runtime.composite_model import CompositeModel, find_name
from lowtide.state.process_group import several_processes
from lowtide.state.side_effects import CodeState
from lowtide.state.step_outcome import is_out_of_memory
from lowtide.units import format_bytes
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from lowtide.api.apply import Applied

LOOKS: Final = 3
"""Number of calls that are checked for changes outside the model's modules. The first one may fill caches."""

HELD_SHARE: Final = 20
"""Divisor of the predicted peak: gradients of the model's outputs are held through backward if they take at most this
part of the peak.
"""


class StepRepeater(Removable):
    """A guard around calls and backward passes of a planned model, which repeats a call or pass once if it runs out of
    memory.
    """

    def __init__(
        self, model: nn.Module, applied: Applied, say: Callable[[str], None], repeated: Callable[[], object]
    ) -> None:
        """Begin to guard the model; `repeated` is called for each repeated step."""
        self._model, self._applied, self._say, self._repeated = model, applied, say, repeated
        self.mutable_state = MutableState(model)
        self._looks_left = LOOKS
        self._why_not = _why_never(model, applied)
        """Reason why steps of this model are not repeated; None if none is known."""
        if self._why_not is not None:
            self._looks_left = 0
            say(f"a step that runs out of memory will not be repeated: {self._why_not}")
        self.growth = applied.growth
        self.most_held_bytes = applied.plan.predicted.peak_bytes // HELD_SHARE
        self.numbers = itertools.count()
        self.entered: list[_Call] = []
        """Calls that the backward pass in progress has entered."""
        self.is_repeating = False
        self._is_calling = False
        self._explaining = explain_oom(model)
        """Created beforehand: it reserves the memory that an explanation needs when none is left."""
        self._front = OuterInterceptor(model, self._call)
        self._undo = replace_function(torch.autograd, ENGINE, partial(partial, partial(_guarded, weakref.ref(self))))
        weakref.finalize(self, self._undo).atexit = False

    def remove(self) -> None:
        """Stop guarding. Repeated calls do nothing."""
        self._front.remove()
        self._undo()

    # --- the call

    def _call(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_trained = torch.is_grad_enabled() and self._model.training and not (in_backward() or in_transform())
        if not is_trained or self._is_calling:
            return inner(*args, **kwargs)
        self._is_calling = True
        try:
            return self._run_trained_call(inner, args, kwargs)
        finally:
            self._is_calling = False

    def _run_trained_call(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = _Call(self, inner, args, kwargs)
        own = CodeState(self._model, call.context) if self._looks_left else None
        try:
            output = call.run()
            if own is not None:
                self._learn(own)
            return output
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if why := (self._why_not if own is None else _changes(own)) or call.why_changed():
                self._explain(error, why)
                raise
            failed = _clear_frames(error)
        # Outside `except`, which would keep the failed call's frames and tensors alive.
        own = None
        call.context.restore()
        self._begin("the model's forward", failed, args, kwargs)
        with self._last_try():
            return _Call(self, inner, args, kwargs).run()

    def _learn(self, own: CodeState) -> None:
        """Check if a call has changed state outside the model's modules, which would rule out repetitions."""
        self._looks_left -= 1
        self._why_not = _changes(own)
        if self._why_not is None:
            self._looks_left = 0
        elif not self._looks_left:
            self._say(f"a step that runs out of memory will not be repeated: {self._why_not}")

    # --- the backward pass

    def run(self, engine: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; repeat it if it runs out of memory."""
        if self.is_repeating or in_backward():
            return engine(tensors, *args, **kwargs)
        keeps = bool(args[1])
        try:
            return self._run(engine, tensors, *args, **kwargs)
        finally:
            for call in self.entered:
                call.leave(keeps=keeps)
            self.entered.clear()

    def _run(self, engine: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        before = [_Gradient(parameter) for parameter in self._model.parameters()]
        _, keeps, creates, inputs = args[:4]
        is_plain_pass = not (keeps or creates or inputs) and bool(kwargs.get("accumulate_grad"))
        try:
            return engine(tensors, *args, **kwargs)
        except Exception as error:
            if not (is_out_of_memory(error) and any(map(_find_call, _outside(tensors)))):
                raise
            if why := self._why_not_again(tensors, before, is_plain_pass=is_plain_pass):
                self._explain(error, why)
                raise
            failed = _clear_frames(error)
        # Outside `except`, which would keep the frames and tensors of the failed pass alive.
        missing = [gradient.parameter for gradient in before if not gradient.has_arrived()]
        calls = sorted(self.entered, key=lambda call: call.number)
        _release_all((*tensors, *(output for call in calls for output in call.outputs())))
        self._begin("backward", failed, calls[0].args, calls[0].kwargs)
        self.is_repeating = True
        try:
            with self._last_try():
                self._repeat_backward(calls, [parameter for parameter in missing if parameter.requires_grad])
        finally:
            self.is_repeating = False

    def _repeat_backward(self, calls: Sequence[_Call], missing: Sequence[nn.Parameter]) -> None:
        """Run the `calls` of the model again, and add the gradients of the parameters `missing`."""
        pairs = [pair for call in calls for pair in call.again()]
        if pairs and missing:
            outputs, received = zip(*pairs, strict=True)
            del pairs
            torch.autograd.backward(outputs, received, inputs=missing)

    def _why_not_again(
        self, tensors: Sequence[Tensor], before: Sequence[_Gradient], *, is_plain_pass: bool
    ) -> str | None:
        """Return the reason why the failed backward pass from `tensors` can't be repeated; None if it can."""
        if self._why_not is not None:
            return self._why_not
        if not is_plain_pass:
            return "this backward pass keeps or creates a graph, or is for some inputs only"
        known = {id(gradient.parameter): gradient for gradient in before}
        outside = [*_outside(tensors)]
        entrances = [(call, node.place) for node in outside if (call := _find_call(node)) is not None]
        calls = [call for call, _ in entrances]
        if not all(call.is_entered(place) for call, place in entrances):
            return "backward had not reached the model yet: the loss outside it takes the memory"
        if any(call.gradients is None for call in calls):
            return (
                "the gradients of the model's outputs are too large to be held through backward. Compute the loss in "
                "the model's forward"
            )
        beside = [leaf for node in outside if (leaf := _find_leaf(node)) is not None]
        if any(id(leaf) not in known or not known[id(leaf)].has_arrived() for leaf in beside):
            return "the loss uses parameters of the model directly"
        leaves = [leaf for node in find_nodes_behind(tensors) if (leaf := _find_leaf(node)) is not None]
        if any(id(leaf) not in known for leaf in leaves):
            return "gradients go to tensors that are no parameters of the model"
        return next(filter(None, (call.why_not_again() for call in calls)), None)

    # --- the repetition

    def _begin(self, where: str, failed: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare to repeat a step: free unused memory, put the plan with the smallest peak in force, and report it.

        `where` names the part of the step that ran out of memory, and `failed` is the text of the error. `args` and
        `kwargs` are the arguments of the model's call.
        """
        saves_more = self._applied.save_most(args, kwargs)
        gc.collect()
        if accelerator_in_use():
            torch.accelerator.memory.empty_cache()
        smallest = "the plan with the smallest peak, which stays in force for batches of this size"
        under = smallest if saves_more else "the same plan"
        explanation = explain(failed)
        tried_bytes = None if explanation is None else explanation.message.tried_bytes
        request = "" if tried_bytes is None else f" at a request of {format_bytes(tried_bytes)}"
        self._say(f"{where} ran out of memory{request}: the step is repeated under {under}")
        self._repeated()

    @contextlib.contextmanager
    def _last_try(self) -> Iterator[None]:
        """Within this block, add an explanation to an out-of-memory error of the repeated step."""
        with self._explaining:
            try:
                yield
            except Exception as error:
                if is_out_of_memory(error):
                    error.add_note("lowtide: the step was repeated once, and ran out of memory again.")
                raise

    def _explain(self, error: Exception, why: str) -> None:
        """Add notes to the error: the reason why the step is not repeated, and why memory ran out."""
        error.add_note(f"lowtide: the step is not repeated: {why}.")
        self._explaining.__exit__(type(error), error, error.__traceback__)


def _why_never(model: nn.Module, applied: Applied) -> str | None:
    """Return the reason why steps under this plan can't be repeated; None if they can."""
    if several_processes():
        return "other processes train with this one, and would not repeat it"
    if type(model) is CompositeModel:
        return f"{find_name(model)} are called one by one, with code of the script in between"
    if levers := [lever.name for lever in applied.plan.levers if not find_lever(lever.name).is_repeatable]:
        return f"the lever {levers[0]!r} runs parts of it by itself"
    return None


def format_repeat_count(n: int) -> str:
    """Return a message with the number `n` of repeated steps."""
    return f"{n} step{' was' if n == 1 else 's were'} repeated after running out of memory"


class _Call:
    """A call of the model: its arguments and the state before it. The autograd graph of its outputs keeps this object
    alive.
    """

    def __init__(
        self, repeater: StepRepeater, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._repeater = weakref.ref(repeater)
        self.number = next(repeater.numbers)
        self.inner, self.args, self.kwargs = inner, args, kwargs
        self._tensors = collect_call_tensors(args, kwargs)
        self._versions = [_version(tensor) for tensor in self._tensors]
        devices = {tensor.device for tensor in self._tensors}
        self.context = CallContext(repeater.mutable_state, devices)
        self._hook_recorder: hooks.HookRecorder | None = None
        self._outputs: list[weakref.ref[Tensor]] = []
        self._places: set[int] = set()
        """Numbers of the outputs through which the backward pass in progress has entered the call."""
        self.most_held_bytes = int(repeater.most_held_bytes * repeater.growth(args, kwargs))
        """Largest total of the gradients to hold; a larger batch has a larger peak, and larger gradients."""
        self.gradients: dict[int, Tensor | None] | None = {}
        """Gradients of the outputs, by number; None if they are too large to be held."""
        self._is_released = False
        """True once a backward pass has released the arguments; another one may enter through other outputs."""

    def run(self) -> Any:
        """Run the call, and pass each output through a node that records the gradient with which backward enters.

        One node for all outputs would also lead backward to outputs that a loss does not use.
        """
        self._hook_recorder = hooks.HookRecorder(self.context.mutable_state.modules)
        try:
            output = self.inner(*self.args, **self.kwargs)
        finally:
            self._hook_recorder.stop()
        self.context.learn()
        self.context.random.end_call()
        outputs = _with_graph(output)
        if not outputs:
            return output
        lead: Any = _Entrance.apply
        led = [lead(self, place, tensor) for place, tensor in enumerate(outputs.values())]
        self._outputs = [weakref.ref(tensor) for tensor in led]
        return replace_tensors(output, dict(zip(outputs, led, strict=True)))

    def leave(self, *, keeps: bool) -> None:
        """End a backward pass; the arguments are released unless the pass `keeps` the graph."""
        self.gradients = {}
        self._places.clear()
        if not keeps and not self._is_released:
            self._is_released = True
            self.args, self.kwargs, self._tensors, self._versions = (), {}, [], []
            del self.context

    def outputs(self) -> list[Tensor]:
        """Return the outputs that are alive."""
        return [tensor for reference in self._outputs if (tensor := reference()) is not None]

    def entered(self, place: int, gradient: Tensor | None) -> None:
        """Record that backward has entered the call through the output at `place`, with this gradient."""
        repeater = self._repeater()
        if repeater is None or repeater.is_repeating:
            return
        if self not in repeater.entered:
            repeater.entered.append(self)
        self._places.add(place)
        if self.gradients is not None:
            self.gradients[place] = gradient
            if sum(g.nbytes for g in self.gradients.values() if g is not None) > self.most_held_bytes:
                self.gradients = None

    def is_entered(self, place: int) -> bool:
        """Return True if the backward pass in progress has entered the call through the output with number `place`."""
        return place in self._places

    def why_changed(self) -> str | None:
        """Return a message if arguments, parameters or buffers have changed since the call, else None."""
        now = collect_call_tensors(self.args, self.kwargs)
        if [*map(id, now)] != [*map(id, self._tensors)] or [*map(_version, now)] != self._versions:
            return "the arguments of the model's call were changed since"
        if self.context.uncopied.have_changed:
            return "parameters or buffers were changed since"
        return None

    def why_not_again(self) -> str | None:
        """Return the reason why the call can't be run again in backward; None if it can."""
        if self._is_released:
            return "an earlier backward pass has gone through the same call of the model"
        if any(tensor.requires_grad for tensor in self._tensors):
            return "the model's arguments need gradients, too"
        return self.why_changed()

    def again(self) -> list[tuple[Tensor, Tensor]]:
        """Restore the state before the call, and run the call again; return its outputs with the gradients received."""
        assert self._hook_recorder is not None
        with without_overrides(), StateAtCall(self.context, self._hook_recorder.acting):
            outputs = [*_with_graph(self.inner(*self.args, **self.kwargs)).values()]
        assert self.gradients is not None
        assert len(outputs) == len(self._outputs)
        received, self.gradients = self.gradients, {}
        return [(outputs[place], gradient) for place, gradient in received.items() if gradient is not None]


class _Entrance(torch.autograd.Function):
    """Identity function on one output of a call, whose backward records the output's gradient on the call."""

    @staticmethod
    def forward(ctx: Any, call: _Call, place: int, output: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.place = call, place
        return output.detach()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.call.entered(ctx.place, gradient)
        return None, None, gradient


class _Gradient:
    """The gradient of a parameter before a backward pass."""

    __slots__ = ("_before", "_version", "parameter")

    def __init__(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        self.parameter = parameter
        self._before = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else _version(gradient)

    def has_arrived(self) -> bool:
        """Return True if the backward pass has added to the gradient, which it does once, when the gradient is
        complete.
        """
        now = self.parameter.grad
        if self._before is None or now is None:
            return now is not None or self._before is not None
        return self._before() is not now or _version(now) != self._version


@not_compiled_alone
def _guarded(repeater: weakref.ref[StepRepeater], engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    there = repeater()
    return engine(*args, **kwargs) if there is None else there.run(engine, *args, **kwargs)


def _with_graph(output: Any) -> dict[int, Tensor]:
    """Return the tensors in a model's output that backward can start from, by id."""
    return {
        id(tensor): tensor for tensor in find_output_tensors(output) if tensor.grad_fn is not None and is_plain(tensor)
    }


def _changes(own: CodeState | None) -> str | None:
    return None if own is None else own.why_not_again()


def _outside(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the autograd nodes from `tensors` up to and including calls of the model."""
    pending: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited: set[Any] = set()
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            yield node
            if _find_call(node) is None:
                pending += [upstream for upstream, _ in node.next_functions if upstream is not None]


def _find_call(node: Any) -> _Call | None:
    call = getattr(node, "call", None)
    return call if isinstance(call, _Call) else None


def _find_leaf(node: Any) -> Tensor | None:
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _release_all(tensors: Iterable[Tensor]) -> None:
    """Release the graphs behind `tensors` where possible: views may not allow it."""
    for tensor in tensors:
        try:
            release(tensor)
        except LowtideError:
            continue


def _clear_frames(error: BaseException | None) -> str:
    """Clear the local variables in a caught error's traceback; return the first line of its message."""
    said = str(error).partition("\n")[0]
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    return said
