"""What a plan says about each call of each module, by address: looked up once and not in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from lowtide.planner.address_nodes import NOTED, OFFLOAD, SHAPE, split_address

if TYPE_CHECKING:
    from lowtide.runtime.call_interceptor import CallInterceptor


class Decision:
    """Decision on one saved tensor, by its address: recompute by the recipe of a named autograd node, or offload."""

    __slots__ = ("address", "lengths", "node")

    def __init__(self, node: str, address: str) -> None:
        self.node, self.address = node, address
        self.lengths: set[int] = set()
        """Numbers of nodes that the recompute went through in runs whose every saved tensor was seen."""


class Actions:
    """Decisions of a plan for one call of one module: ordinals to recompute, and whether it is replayed or advanced."""

    __slots__ = ("advance", "inputs", "noted", "notes", "recompute", "replay", "shape")

    def __init__(self) -> None:
        self.recompute: dict[int, Decision] = {}
        self.inputs: dict[int, Decision] = {}
        self.replay = False
        self.advance = False
        """Whether its result is made by running it forward again."""
        self.notes = False
        """Whether what operators are given is noted."""
        self.noted: set[int] = set()
        """Ordinals of the tensors that are held when they are."""
        self.shape = False
        """Whether of an input only the shape is held once the call is over."""

    def moved(self, path: str, to: str) -> Actions:
        """Return the same decisions for a module at another path."""
        found = Actions()
        for name in Actions.__slots__:
            setattr(found, name, getattr(self, name))
        for name in ("recompute", "inputs"):
            decisions: dict[int, Decision] = getattr(self, name)
            moved = {n: Decision(d.node, to + d.address.removeprefix(path)) for n, d in decisions.items()}
            setattr(found, name, moved)
        return found


NO_ACTIONS = Actions()


class NeededSlots:
    """The saved tensors of each call that the engine has to see, learnt in a run in which it saw all of them.

    Those that are decided, those that are left to a replay, and those whose value an edge of the autograd graph was
    asked for. Around all others autograd saves tensors as without a plan, and checks their versions.
    """

    __slots__ = ("by_call", "idle")

    def __init__(self) -> None:
        self.by_call: dict[CallInterceptor, dict[int, set[int]]] = {}
        """The ordinals for each call of a module, by its number."""
        self.idle: frozenset[CallInterceptor] = frozenset()
        """Modules of whose calls nothing is needed or decided."""

    def learn(self, plan: int, found: Mapping[CallInterceptor, Mapping[int, set[int]]]) -> None:
        """Add what was seen in one run."""
        for seam, calls in found.items():
            known = self.by_call.setdefault(seam, {})
            for number, ordinals in calls.items():
                decided = seam.actions[plan].get(number, NO_ACTIONS).recompute  # also where other hooks took them
                known[number] = known.get(number, set()) | ordinals | decided.keys()
        self.idle = frozenset(
            seam
            for seam, calls in self.by_call.items()
            if not (any(calls.values()) or seam.replays or seam.is_compiled or seam.actions[plan])
        )


def actions_for(
    recompute: Mapping[str, str], replay: Iterable[str], advance: Iterable[str] = (), offload: Iterable[str] = ()
) -> dict[str, dict[int, Actions]]:
    """Decisions by module path and call number, from addresses as plans write them."""
    table: dict[str, dict[int, Actions]] = {}

    def of(call: str) -> Actions:
        path, _, number = call.rpartition("#")
        return table.setdefault(path, {}).setdefault(int(number), Actions())

    for address, node in {**dict.fromkeys(offload, OFFLOAD), **recompute}.items():
        call, mark, place = split_address(address)
        name, notes, ordinals = node.partition(NOTED)
        (of(call).inputs if mark == "@" else of(call).recompute)[int(place)] = Decision(name, address)
        of(call).notes |= bool(notes)
        of(call).noted.update(map(int, filter(None, ordinals.strip().split(","))))
        of(call).shape |= node == SHAPE
    for call in replay:
        of(call).replay = True
    for call in advance:
        of(call).advance = True
    return table


def with_like_blocks(model: nn.Module, table: Mapping[str, dict[int, Actions]]) -> dict[str, dict[int, Actions]]:
    """Add to `table` what blocks without a decision get: the decisions on a block of their class in the same list.

    For plans of work that is drawn at random, where rehearsals may not have seen every block.
    """
    found = dict(table)
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
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
                found[to] = {call: actions.moved(key, to) for call, actions in table[key].items()}
    return found
