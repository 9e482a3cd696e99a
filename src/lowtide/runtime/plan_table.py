"""What a plan says about each call of each module, by address: looked up once and not in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from lowtide.planner.address_nodes import NOTED, OFFLOAD, SHAPE, split_address


class Decision(NamedTuple):
    """Decision on one saved tensor, by its address: recompute by the recipe of a named autograd node, or offload."""

    node: str
    address: str


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
            moved = {n: d._replace(address=to + d.address.removeprefix(path)) for n, d in decisions.items()}
            setattr(found, name, moved)
        return found


NO_ACTIONS = Actions()


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
