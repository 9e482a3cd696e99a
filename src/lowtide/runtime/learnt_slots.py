"""Saved tensors that a plan's hooks have to see, learnt from runs in which they see all tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from lowtide.runtime.call_interceptor import RemovableInterceptors
from lowtide.runtime.plan_table import NO_ACTIONS

if TYPE_CHECKING:
    from torch import nn

    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.forward_pass import CallScope, ForwardPass

MAX_LEARNT_AGAIN = 3
"""Number of times that the needed saved tensors are learnt again. After that the hooks see all tensors, because runs
differ too much.
"""


class NeededSlots:
    """Saved tensors of each module call that the hooks have to see, learnt in a run in which the hooks saw all tensors.

    These are tensors with a decision, tensors that a replay restores, and operands of recomputes. Autograd saves all
    others as without a plan, and checks their versions.
    """

    __slots__ = ("by_call", "idle", "n_saved", "unneeded")

    def __init__(self) -> None:
        self.by_call: dict[CallInterceptor, dict[int, set[int]]] = {}
        """Ordinals of the needed saved tensors, by module and call number."""
        self.n_saved: dict[CallInterceptor, dict[int, int]] = {}
        """The most tensors that a call has saved itself in any run, by module and call number."""
        self.idle: frozenset[CallInterceptor] = frozenset()
        """Interceptors of modules that save no needed tensor in any call, and for which the plan decides nothing."""
        self.unneeded: RemovableInterceptors | None = None
        """Interceptors of idle modules that are not called while hooks are pushed, so that they can be taken out; None
        once such a module may have been called then.
        """

    def learn(self, plan: int, scopes: Iterable[tuple[CallInterceptor, CallScope]]) -> None:
        """Add the needed saved tensors of the calls (`scopes`) in one run under the plan of number `plan`."""
        for interceptor, scope in scopes:
            known = self.by_call.setdefault(interceptor, {})
            # includes slots that other hooks packed
            decided = interceptor.actions[plan].get(scope.number, NO_ACTIONS).recompute
            known[scope.number] = known.get(scope.number, set()) | (scope.learnt or set()) | decided.keys()
            n_saved = self.n_saved.setdefault(interceptor, {})
            n_saved[scope.number] = max(scope.ordinal, n_saved.get(scope.number, 0))
        self.idle = frozenset(
            interceptor
            for interceptor, calls in self.by_call.items()
            if not (any(calls.values()) or interceptor.replays or interceptor.is_compiled or interceptor.actions[plan])
        )
        called = {interceptor.module: interceptor for interceptor in self.by_call}
        inside = {
            module
            for interceptor in self.by_call.keys() - self.idle
            for module in _find_called_modules(interceptor, plan, called)
        }
        self.unneeded = RemovableInterceptors(it for it in self.idle if it.path and it.module not in inside)


class LearntSlots:
    """The saved tensors that the hooks have to see, for each plan of an engine, as learnt from earlier runs."""

    def __init__(self, n_plans: int) -> None:
        self.is_possible = True
        """True if all decisions are in the plans' tables, so that one run shows the saved tensors that are needed."""
        self._learnt: list[NeededSlots]
        self._complete: list[NeededSlots | None]
        """The needed saved tensors by plan; None if the hooks have to see all tensors in the next run of the plan."""
        self._n_again = 0
        """Number of learning runs after the first one of each plan."""
        self._last_packed: Callable[[], object] = lambda: None
        """Function that returns the last saved tensor of the learning run, or None once backward has read it. Until
        then further calls of the model are of the same step, and may need other tensors.
        """
        self.forget(n_plans)

    def forget(self, n_plans: int) -> None:
        """Forget all runs, and start again with `n_plans` plans."""
        self._learnt, self._complete = [NeededSlots() for _ in range(n_plans)], [None for _ in range(n_plans)]

    def needed(self, plan: int) -> NeededSlots | None:
        """Return the saved tensors that the hooks have to see in the next run of `plan`; None if they have to see
        all.
        """
        return self._complete[plan] if self._last_packed() is None else None

    def learn_again(self, plan: int) -> None:
        """Let the hooks see all tensors in the next run of `plan`; in every run, once called `MAX_LEARNT_AGAIN`
        times.
        """
        self._complete[plan] = None
        self._n_again += 1
        self.is_possible = self.is_possible and self._n_again < MAX_LEARNT_AGAIN

    def add(self, run: ForwardPass) -> None:
        """Add the needed saved tensors that `run` has learnt, if it was a learning run."""
        if run.learnt:
            self._learnt[run.plan].learn(run.plan, run.learnt)
            self._complete[run.plan] = self._learnt[run.plan]
            self._last_packed = run.last_packed


def _find_called_modules(
    interceptor: CallInterceptor, plan: int, called: Mapping[nn.Module, CallInterceptor]
) -> Iterator[nn.Module]:
    """Yield the modules that the module of `interceptor` may call while hooks are pushed for its calls.

    `called` maps the modules that a run has called to their interceptors.
    """
    if interceptor.replays or any(actions.captures for actions in interceptor.actions[plan].values()):
        yield from interceptor.module.modules()  # the hooks, or the capture, are in force in all of them
        return
    pending = [*interceptor.module.children()]
    while pending:
        module = pending.pop()
        yield module
        if module not in called:  # a container, whose modules are called by others
            pending += module.children()
