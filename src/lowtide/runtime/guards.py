"""Checks that a plan in force still fits: larger batches, more state and compiled code may invalidate it."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide._torch.compiled_code import called_between_graphs
from lowtide._torch.optim import list_parameters
from lowtide.runtime.batch_tensors import put_in_words
from lowtide.runtime.call_arguments import collect_call_tensors
from lowtide.runtime.call_interceptor import OuterInterceptor, pass_on
from lowtide.runtime.call_shapes import Shapes, elements, list_tensor_shapes, no_larger, parse_shapes
from lowtide.runtime.composite_model import find_name
from lowtide.runtime.fingerprint import find_device
from lowtide.runtime.known_calls import KnownCalls
from lowtide.runtime.live_optimizers import find_optimizers, is_of, state_bytes
from lowtide.runtime.plan_messages import MEASURED
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from lowtide.planner.records import Plan
    from lowtide.runtime.engine import Engine


_REQUIRES_GRAD = attrgetter("requires_grad")
_VALUES = methodcaller("values")  # includes parameters of TorchScript modules, which are in no dict

_MOST_SHAPES = 1024
"""Largest number of shapes that a guard remembers."""


Changed: TypeAlias = Callable[[Literal["model", "step", "state"], str], bool]
"""Function that is called with a kind of change and its description: the model is not as planned ("model"), a step
differs from the rehearsed ones ("step"), or optimizers have more state ("state"). It returns True if another plan is
made when it is needed.
"""


class PlanGuard:
    """Monitor that warns once if `model` gets larger input than in its rehearsal, trains more parameters, or has a new
    module.

    The monitor keeps `owner` alive while it is installed. `outgrown` is called with the description of a batch that has
    more elements than any planned batch, `changed` with the description of a change of the model; if they return True,
    no warning is given. `calls` compares the model's calls with those of the rehearsed steps.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        say: Callable[[str], None],
        owner: object,
        outgrown: Callable[[str], bool] = lambda what: False,
        changed: Changed = lambda kind, what: False,
        calls: KnownCalls | None = None,
    ) -> None:
        self._model, self._plan, self._say, self._on_outgrown, self._on_changed = model, plan, say, outgrown, changed
        self._calls = calls or KnownCalls()
        self._known = [parse_shapes(words) for words in plan.input_shapes]
        self._fitting: set[Shapes] = set()
        """Shapes of calls that have been found to be no larger than in the rehearsal."""
        named = dict(model.named_modules())
        self._paths = [*named]
        self._children = [module._modules for module in named.values()]
        self._planned_children = [dict(children) for children in self._children]
        self._parameters = [module._parameters for module in named.values()]
        self._n_trained = self._count_trained() + self._count_paused()
        self._most = max(map(elements, self._known), default=0)
        self._is_over = False
        self._decides = bool(plan.recompute or plan.replay or plan.advance or plan.in_place)
        """True if the plan changes anything. If not, backward is watched only while steps are measured: 8 us a step."""
        self._interceptor = OuterInterceptor(model, self._intercept, owner)

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module | None = None) -> None:
        """Check a training call of the model, or of its `part`: warn of larger input than planned, and of changes of
        the model.
        """
        if self._is_over:
            return
        tensors = collect_call_tensors(args, kwargs)
        shapes = list_tensor_shapes(tensors)
        if self._calls.n_planned:
            self._calls.see(self._model, tensors, args, kwargs, part)
        if shapes not in self._fitting and not self._fits(shapes):
            given, planned = put_in_words(tensors), " and for ".join(self._plan.input_shapes)
            what = f"was given {given}, and the plan is for {planned}"
            if elements(shapes) > self._most and self._on_outgrown(what):
                self._stop()
            else:
                self._warn(what)
        elif (
            self._list_parameter_ids() != self._ids or any(map(_REQUIRES_GRAD, self._frozen))
        ) and self._count_trained() > self._n_trained:
            self._report_change(
                f"has {self._count_trained()} parameters that are trained, and the plan is for {self._n_trained}"
            )
        elif self._children != self._planned_children and (path := self._find_replaced_module()) is not None:
            self._report_change(f"has another module at {path}, where the plan is for the one that it had")

    def remove(self) -> None:
        """Remove the monitor from the model. May be called again."""
        self._interceptor.remove()

    def _stop(self) -> None:
        """Stop checking calls of the model."""
        self._is_over, self._interceptor.around = True, pass_on

    def _intercept(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not (self._model.training and torch.is_grad_enabled()):
            if self._calls.n_planned:
                self._calls.see_between(self._model)
            return inner(*args, **kwargs)
        self.look(args, kwargs)
        result = inner(*args, **kwargs)
        if self._calls.n_planned and (self._decides or self._calls.are_detected):
            self._calls.watch(result)
        return result

    def _fits(self, shapes: Shapes) -> bool:
        """Return True if a call with these shapes is no larger than in the rehearsal."""
        if self._known and not any(no_larger(shapes, most) for most in self._known):
            return False
        if len(self._fitting) < _MOST_SHAPES:
            self._fitting.add(shapes)
        return True

    def _list_parameter_ids(self) -> list[int]:
        """Return the ids of the parameters, without a call of a Python function for each parameter."""
        return [*map(id, itertools.chain.from_iterable(map(_VALUES, self._parameters)))]

    def _count_trained(self) -> int:
        """Count the parameters that are trained; record the ids of all parameters, and the frozen parameters."""
        held = [p for parameters in self._parameters for p in parameters.values() if p is not None]
        self._ids, self._frozen = self._list_parameter_ids(), [p for p in held if not p.requires_grad]
        return len({id(p) for p in held if p.requires_grad})

    def _count_paused(self) -> int:
        """Count parameters that optimizers have updated and that are frozen now, such as a critic's while the actor
        trains.
        """
        if not self._frozen:
            return 0
        updated = {id(p) for optimizer in find_optimizers(self._model) for p in optimizer.state}
        return len(updated & set(map(id, self._frozen)))

    def _find_replaced_module(self) -> str | None:
        """Return the path of a module that was added or replaced since the plan was put in force; None if none was."""
        for path, now, before in zip(self._paths, self._children, self._planned_children, strict=True):
            if now != before:
                names = (name for name, child in now.items() if child is not None and before.get(name) is not child)
                return next((f"{path}.{name}".lstrip(".") for name in names), None)
        return None

    def _report_change(self, what: str) -> None:
        if self._on_changed("model", what):
            self._stop()
        else:
            self._warn(what)

    def _warn(self, what: str) -> None:
        self._stop()
        saving = (
            "" if self._plan.fallback is None else ", though larger batches run under the plan with the smallest peak"
        )
        self._say(
            f"{find_name(self._model)} {what}: the peak may be above the budget{saving}. Plan for the largest "
            "batch (in a script, let it come first), and for the model as it is trained."
        )


SMALLER = "Give a budget that is smaller by that much; for lowtide.fit, create optimizers before it, or pass optimizer="

STATE_LOOKS = 2
"""Number of updates by each optimizer of a model after which its state is measured; the first one creates state."""


def watch_state_growth(
    model: nn.Module, plan: Plan, say: Callable[[str], None], is_taken: Callable[[], bool] = lambda: False
) -> RemovableHandle:
    """Warn once, by calling `say`, if the model's optimizers have more bytes of state than the plan counts.

    The state is measured after updates. `is_taken` is called for the warning, and returns True if a new plan will be
    made when one is needed. torch holds `is_taken` while the model is alive, so it must not refer to the model. The
    returned handle removes the hook that measures the state.
    """
    reference, counted_bytes = weakref.ref(model), plan.plain.parts.get("optimizer", 0)
    looks: dict[weakref.ref[Optimizer], int] = {}  # no WeakKeyDictionary, whose lookup is a call of a Python function
    is_said = False

    @called_between_graphs
    def updated(optimizer: Optimizer, *_: Any) -> None:
        nonlocal is_said
        model = reference()
        n_looks = looks.get(weakref.ref(optimizer), 0)
        if model is None or is_said or n_looks == STATE_LOOKS or isinstance(optimizer, torch.optim.LBFGS):
            return  # a note in the plan says how the state of L-BFGS grows
        looks[weakref.ref(optimizer)] = n_looks + 1
        mine = [o for look in looks if (o := look()) is not None and is_of(model, o)]
        if optimizer in mine and (more_bytes := state_bytes(mine, find_device(model)) - counted_bytes) > 0:
            is_said = True
            advice = MEASURED if is_taken() else SMALLER
            say(
                f"{type(optimizer).__name__} updates {find_name(model)}, whose optimizers have "
                f"{format_bytes(more_bytes)} more state than is in the plan, for parameters that rehearsed steps did "
                f"not update: the peak may be above the budget by as much. {advice}"
            )

    return _expire_with(model, register_optimizer_step_post_hook(updated))


def _expire_with(obj: object, hook: RemovableHandle) -> RemovableHandle:
    """Arrange that `hook`, a global optimizer hook, is removed after `obj` is freed; return `hook`.

    torch itself keeps global hooks until the process ends.
    """
    remove_expired()
    weakref.finalize(obj, _EXPIRED.append, hook).atexit = False
    return hook


_EXPIRED: list[RemovableHandle] = []
"""Hooks of freed objects. Garbage may be collected while torch runs hooks, which must not be removed then."""


def remove_expired() -> None:
    """Remove the hooks of freed objects. Must not be called by optimizer hooks."""
    while _EXPIRED:
        _EXPIRED.pop().remove()


LOOKS = 6
"""Number of updates of a model that are observed."""

UNSEEN = 3
"""Number of steps of one optimizer without an observed call, after which a warning is given."""


def watch_bypass(engine: Engine, say: Callable[[str], None]) -> RemovableHandle:
    """Warn once if calls of the trained model, all or some of them, bypass the plan's interceptors.

    The returned handle removes the hook that checks this after updates.
    """
    reference = weakref.ref(engine)
    looks = LOOKS
    known: dict[int, int] = {}
    """By optimizer, the number of observed calls at its last step."""
    unseen: Counter[int] = Counter()
    """By optimizer, its consecutive steps without an observed call. A few may use gradients from before the plan."""

    @called_between_graphs
    def updated(optimizer: Optimizer, *_: Any) -> None:
        nonlocal looks
        engine, key = reference(), id(optimizer)
        if engine is None or not looks:
            return
        trained = {id(p) for p in engine.model.parameters() if p.grad is not None}
        if not any(id(p) in trained for p in list_parameters(optimizer)):
            return
        looks -= 1
        unseen[key] = unseen[key] + 1 if engine.n_runs == known.get(key, 0) else 0
        known[key] = engine.n_runs
        model, lost = type(engine.model).__name__, next(engine.interceptors.displaced(), None)
        if lost is None and unseen[key] < UNSEEN:
            return
        looks = 0
        if lost is None and engine.n_runs_in_eval_mode:
            say(f"{model} is trained in eval mode, where a plan does nothing: call model.train() first.")
        else:
            say(
                f"{lost or model} is trained outside the plan that is in force on it: compiled code (torch.compile) "
                "or a copy runs in its place, and saves what torch decides. The peak may be above the budget. "
                "Compile blocks in their place before they are planned for (block.compile())."
            )

    return _expire_with(engine, register_optimizer_step_post_hook(updated))
