"""Calls of a model in rehearsed steps: a step of another kind is noticed at the first call that is unlike all of them.

The form of a call tells kinds of steps apart that have batches of one size: a gradient penalty needs an input that
requires a gradient, and flags switch parts of a model on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from lowtide.units import format_count

if TYPE_CHECKING:
    from torch import nn

_REQUIRES_GRAD = attrgetter("requires_grad")

MOST_FORMS: Final = 16
"""If calls have more forms than this, string arguments are data, such as captions, and forms are not compared."""

MOST_BETWEEN: Final = 20_000
"""Number of module calls between two steps after which memory is no longer recorded: in a long evaluation the events
would take too much memory.
"""

Form: TypeAlias = tuple[tuple[bool, ...], tuple[bool | str, ...]]
"""For each tensor in a call's arguments, True if it requires a gradient; and the arguments that are bools or
strings.
"""


class KnownCalls:
    """Record of a model's calls in rehearsed steps: the forms of their arguments, and the most calls in a step."""

    def __init__(self) -> None:
        """Begin without a rehearsed step: no call is reported before the first `end_rehearsal`."""
        self.n = 0
        """Number of calls in this step, counted by the owner while steps are detected."""
        self.n_planned = 0
        """Largest number of calls in a rehearsed step; 0 until one has ended."""
        self.n_seen = self._most_seen = 0
        """Number of calls that `see` has counted in this step, and the largest such number of a measured step."""
        self.is_unlike = False
        """True once this step has made a call unlike those of the rehearsed steps."""
        self.are_detected = True
        """True while steps are detected and measured; the forms of their calls may be added to the known ones."""
        self.noticed: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], str], None] = lambda *_: None
        """Function called with the model, the arguments and a description at the first unlike call of a step."""
        self.noticed_backward: Callable[[str], None] = lambda what: None
        """Function called with a description when a backward pass begins that is unlike those of measured steps."""
        self.begins_between: Callable[[nn.Module], None] = lambda model: None
        self.ends_between: Callable[[int], None] = lambda n: None
        """Functions for calls of the model between steps that do not train, as in a rollout. The first one is called at
        the second such call; the second one, with their number, at the next step or once they are `_most_between`.
        """
        self._n_between = 0
        """Number of calls since the last step that do not train."""
        self._most_between = 0
        """Largest number of such calls that are recorded."""
        self.several_backwards = self.builds_graphs = False
        """True if backward read other tensors in some rehearsed steps than in others; True if backward built a graph
        (`create_graph=True`) in one of them.
        """
        self._passes: set[tuple[int, bool]] = set()
        """Numbers of the model's outputs at which backward passes have begun, each with True if it built a graph."""
        self._forms: set[Form] = set()
        self._has_met = False
        """True once `see` has compared a call that has the form of a rehearsed one."""
        self.is_reported = False
        """True once a step with more calls than the rehearsed one has been reported."""

    def begin_step(self) -> None:
        """Begin a step with its first call."""
        self.n, self.n_seen, self.is_unlike, self.are_detected = 1, 0, False, True

    def end_rehearsal(self) -> None:
        """Record the end of a rehearsed step: plans are for steps with at most as many calls as a rehearsed one."""
        self.n_planned = max(self.n_planned, self.n)

    def detach(self, *, shows_ends: bool) -> None:
        """Record that steps are no longer measured: their calls are compared with the known ones, but not added to
        them.

        `shows_ends` is True if it is still known where each step ends. Otherwise the calls of a step can't be counted,
        so no later call or backward pass is compared with the rehearsed ones.
        """
        self.n_seen, self.are_detected = 0, False
        if not shows_ends:
            self.n_planned = 0

    def see(
        self,
        model: nn.Module | None,
        tensors: Iterable[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        part: nn.Module | None = None,
    ) -> None:
        """Compare a call of `model` with the rehearsed ones; report it if it is the first unlike call in this step.

        If `model` is None, the call is in a rehearsed step, and the form of its arguments is recorded instead.

        `tensors` are the tensors in the arguments. `part` is the part of the model that is called, if it is not the
        model itself.
        """
        flags = []
        for value in (*args, *kwargs.values()):  # this runs in every step, so it makes few calls
            if type(value) is bool or type(value) is str:
                flags.append(value)
        form = tuple(map(_REQUIRES_GRAD, tensors)), tuple(flags)
        if model is None:
            self._forms.add(form)
            return
        self.n_seen += 1
        if self._n_between:
            self.end_between()
        if self._has_met and not self.are_detected and self.n_seen <= self._most_seen and form in self._forms:
            return  # as in nearly all steps
        is_known = form in self._forms or len(self._forms) > MOST_FORMS
        if self.are_detected:
            self._most_seen = max(self._most_seen, self.n_seen)
            if not (is_known or self._has_met):  # the rehearsed calls were those of a wrapper
                self._forms.add(form)
                return
        self._has_met |= is_known
        too_many = not self.are_detected and self.n_seen > max(self._most_seen, self.n_planned)
        if not self.is_unlike and (too_many or not is_known) and not _is_frozen(part):
            self.is_unlike = True
            self.noticed(model, args, kwargs, self._put_in_words(form, is_known=is_known))

    def see_between(self, model: nn.Module) -> None:
        """Count a call of `model` between two steps that does not train it."""
        self._n_between += 1
        if self._n_between == 2:
            self._most_between = 3 + MOST_BETWEEN // sum(1 for _ in model.modules())
            self.begins_between(model)
        elif self._n_between == self._most_between:
            self.ends_between(self._n_between)

    def end_between(self) -> None:
        """Record that a step begins, which ends a series of calls that do not train."""
        n, self._n_between = self._n_between, 0
        if 2 <= n < self._most_between:
            self.ends_between(n)

    def watch(self, result: Any) -> None:
        """Observe backward passes that begin at a tensor in `result`, which a call of the model returned. A backward
        pass unlike those of rehearsed steps is reported.
        """
        if isinstance(result, Tensor):
            outputs: Iterable[Any] = (result,)
        elif isinstance(result, Mapping):
            outputs = result.values()
        else:
            outputs = result if isinstance(result, tuple | list) else ()
        for number, output in enumerate(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(partial(self._pass_begins, number))

    def _pass_begins(self, number: int, _: Any) -> None:
        builds_graph = torch.is_grad_enabled()
        key = number, builds_graph
        if key in self._passes or self.is_unlike or not self.n_planned:
            return
        if self.are_detected or (self.builds_graphs if builds_graph else self.several_backwards):
            self._passes.add(key)
        elif builds_graph:
            self.noticed_backward("backward builds a graph itself in this step (create_graph=True)")
        else:
            self.noticed_backward("backward begins at another output of the model in this step")

    @property
    def is_first_excess(self) -> bool:
        """Return True if this step has more calls than planned, and no such step was reported."""
        return self.n > self.n_planned and not self.is_reported

    def put_in_words(self) -> str:
        """Format the numbers of calls: `this step has 3 calls of the model, and the plan is for steps with 2 calls`."""
        now, planned = format_count(self.n, "call"), format_count(self.n_planned, "call")
        return f"this step has {now} of the model, and the plan is for steps with {planned}"

    def _put_in_words(self, form: Form, *, is_known: bool) -> str:
        if is_known:
            return f"this step has {format_count(self.n_seen, 'call')} of the model"
        grads, flags = form
        if any(flags == known for _, known in self._forms):
            which = "an argument that requires a gradient" if any(grads) else "arguments that require no gradient"
            return f"this step calls the model with {which}"
        return f"this step calls the model with {', '.join(map(repr, flags)) or 'other arguments'}"


def _is_frozen(part: nn.Module | None) -> bool:
    """Return True if `part` is a part of the model without trained parameters. Calls of such parts are never
    reported.
    """
    return part is not None and not any(p.requires_grad for p in part.parameters())
