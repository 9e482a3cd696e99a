"""What a plan says about each call of each module, by address: looked up once and not in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
