"""Decisions of a plan for each call of each module, by address: parsed once, not in every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from lowtide.planner.address_nodes import NOTED, OFFLOAD, SHAPE, split_address
from lowtide.runtime.call_interceptor import RemovableInterceptors

if TYPE_CHECKING:
    from lowtide.runtime.call_interceptor import CallInterceptor
    from lowtide.runtime.forward_pass import CallScope
    from lowtide.runtime.recompute_path import RecomputePath


MOST_PATHS = 4
"""Number of runs in which the path to a recompute's operands may be learnt again; after that every run searches."""


class Decision:
    """Decision on one saved tensor, by its address: recompute by the recipe of a named autograd node, or offload."""

    __slots__ = ("address", "lengths", "n_paths", "node", "path")

    def __init__(self, node: str, address: str) -> None:
        self.node, self.address = node, address
        self.lengths: set[int] = set()
        """Numbers of nodes that the recompute visited in runs whose hooks saw every saved tensor."""
        self.path: RecomputePath | None = None
        """Path to the operands, from the latest run that had to search for them."""
        self.n_paths = 0
        """Number of runs that had to search: after `MOST_PATHS` all do."""


class Actions:
    """Decisions of a plan for one call of one module: ordinals to recompute, and whether it is replayed or advanced."""

    __slots__ = ("advance", "inputs", "noted", "notes", "recompute", "replay", "shape")

    def __init__(self) -> None:
        self.recompute: dict[int, Decision] = {}
        self.inputs: dict[int, Decision] = {}
        self.replay = False
        self.advance = False
        """True if the result is recomputed by running the call forward again."""
        self.notes = False
        """True if operands that autograd does not record are captured."""
        self.noted: set[int] = set()
        """Ordinals of the captured tensors that are held."""
        self.shape = False
        """True if only the shape of an input is held after the call."""

    def moved(self, path: str, to: str) -> Actions:
        """Return the same decisions for a module at another path."""
        actions = Actions()
        for name in Actions.__slots__:
            setattr(actions, name, getattr(self, name))
        for name in ("recompute", "inputs"):
            decisions: dict[int, Decision] = getattr(self, name)
            moved = {n: Decision(d.node, to + d.address.removeprefix(path)) for n, d in decisions.items()}
            setattr(actions, name, moved)
        return actions


NO_ACTIONS = Actions()


class NeededSlots:
    """Saved tensors of each call that the hooks have to see, learnt in a run in which the hooks saw all tensors.

    These are tensors with a decision, tensors left to a replay, and tensors whose value was looked up through an edge
    of the autograd graph. Autograd saves all others as without a plan, and checks their versions.
    """

    __slots__ = ("by_call", "idle", "n_saved", "unneeded")

    def __init__(self) -> None:
        self.by_call: dict[CallInterceptor, dict[int, set[int]]] = {}
        """Ordinals for each call of a module, by the call's number."""
        self.n_saved: dict[CallInterceptor, dict[int, int]] = {}
        """For each call of a module, by the call's number, the most tensors that it has saved itself."""
        self.idle: frozenset[CallInterceptor] = frozenset()
        """Modules without needed or decided tensors in any call."""
        self.unneeded: RemovableInterceptors | None = None
        """Interceptors of those idle modules that no call for which the hooks are pushed is expected to make; None if
        one did so.
        """

    def learn(self, plan: int, scopes: Iterable[tuple[CallInterceptor, CallScope]]) -> None:
        """Add the needed slots of the calls of one run."""
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
            for module in _modules_called_by(interceptor, plan, called)
        }
        self.unneeded = RemovableInterceptors(it for it in self.idle if it.path and it.module not in inside)


def _modules_called_by(
    interceptor: CallInterceptor, plan: int, called: Mapping[nn.Module, CallInterceptor]
) -> Iterator[nn.Module]:
    """Yield the modules that calls of `interceptor` may make while its hooks are in force."""
    if interceptor.replays or any(actions.notes for actions in interceptor.actions[plan].values()):
        yield from interceptor.module.modules()  # the hooks, or the capture, are in force in all of them
        return
    pending = [*interceptor.module.children()]
    while pending:
        module = pending.pop()
        yield module
        if module not in called:  # a container, whose modules are called by others
            pending += module.children()


def actions_for(
    recompute: Mapping[str, str], replay: Iterable[str], advance: Iterable[str] = (), offload: Iterable[str] = ()
) -> dict[str, dict[int, Actions]]:
    """Return decisions by module path and call number, from addresses as plans write them."""
    table: dict[str, dict[int, Actions]] = {}

    def of(call: str) -> Actions:
        path, _, number = call.rpartition("#")
        return table.setdefault(path, {}).setdefault(int(number), Actions())

    for address, node in {**dict.fromkeys(offload, OFFLOAD), **recompute}.items():
        call, kind, place = split_address(address)
        name, notes, ordinals = node.partition(NOTED)
        (of(call).inputs if kind == "@" else of(call).recompute)[int(place)] = Decision(name, address)
        of(call).notes |= bool(notes)
        of(call).noted.update(map(int, filter(None, ordinals.strip().split(","))))
        of(call).shape |= node == SHAPE
    for call in replay:
        of(call).replay = True
    for call in advance:
        of(call).advance = True
    return table


def with_like_blocks(model: nn.Module, table: Mapping[str, dict[int, Actions]]) -> dict[str, dict[int, Actions]]:
    """Return `table`, in which blocks without decisions get those of a block of their class in the same container.

    Used for plans of steps that skip blocks at random, because a rehearsal may not have run every block.
    """
    completed = dict(table)
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        inside = {}
        for name, child in module.named_children():
            block = f"{path}.{name}".lstrip(".")
            keys = [key for key in table if key == block or key.startswith(f"{block}.")]
            inside[block] = type(child), keys
        for block, (kind, keys) in inside.items():
            like = max((o for o in inside if inside[o][0] is kind), key=lambda o: len(inside[o][1]))
            for key in inside[like][1] if not keys else ():
                to = block + key.removeprefix(like)
                completed[to] = {call: actions.moved(key, to) for call, actions in table[key].items()}
    return completed
