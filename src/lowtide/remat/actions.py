"""What a plan says about each call of each module, by address: looked up once and not in every step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

MASK: Final = "Mask"
"""What plans have in the place of an autograd node for a mask that is kept as bits."""
SIGNS: Final = "Signs"
"""The same for a tensor of which backward reads which elements are positive: these are kept as bits."""
SHAPE: Final = "Shape"
"""The same for a tensor of which backward reads only the shape."""

NOTED: Final = "+noted"
"""What plans have behind an autograd node whose recipe takes what has to be noted (`noting.py`). Behind it are the
tensors that are held for that, by their ordinals in the call: `SoftmaxBackward0+noted 0,2`."""
OFFLOAD: Final = "Offload"
"""What plans have in the place of an autograd node for a tensor that waits in memory of the host."""


class Decision(NamedTuple):
    """A saved tensor, by its address, is to be remade by the recipe of an autograd node, by its name; or offloaded."""

    node: str
    address: str


def with_noted(node: str, ordinals: Iterable[int]) -> str:
    """A node's name as plans write it if what its recipe takes has to be noted."""
    return f"{node}{NOTED} {','.join(map(str, sorted(ordinals)))}".rstrip()


def node_name(node: str) -> str:
    """The node's own name of what plans write."""
    return node.partition(NOTED)[0]


def nodes_at(slots: Iterable[tuple[str, int]], nodes: Mapping[int, str]) -> dict[str, str]:
    """What plans write for the address of each slot, given as address and value, in the order of a step.

    `nodes` are the names by value, with what has to be noted: that is in the call that saves the value first. Others
    that save it, too, note nothing for it.
    """
    found, first = dict[str, str](), dict[int, str]()
    for address, value in slots:
        if value in nodes:
            call = first.setdefault(value, _parts(address)[0])
            name = nodes[value] if _parts(address)[0] == call else node_name(nodes[value])
            if address not in found or NOTED in name:
                found[address] = name
    return found


def _parts(address: str) -> tuple[str, str, str]:
    """The call, the mark and the number behind it."""
    call, mark, place = re.split(r"([:@])(?=\d+$)", address)
    return call, mark, place


class Actions:
    """What a plan says about one call of one module: which ordinals are remade, whether it is replayed or advanced."""

    __slots__ = ("advance", "inputs", "noted", "notes", "remake", "replay", "shape")

    def __init__(self) -> None:
        self.remake: dict[int, Decision] = {}
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
    remake: Mapping[str, str], replay: Iterable[str], advance: Iterable[str] = (), offload: Iterable[str] = ()
) -> dict[str, dict[int, Actions]]:
    """Decisions by module path and call number, from addresses as plans write them."""
    table: dict[str, dict[int, Actions]] = {}

    def of(call: str) -> Actions:
        path, _, number = call.rpartition("#")
        return table.setdefault(path, {}).setdefault(int(number), Actions())

    for address, node in {**dict.fromkeys(offload, OFFLOAD), **remake}.items():
        call, mark, place = _parts(address)
        name, notes, ordinals = node.partition(NOTED)
        (of(call).inputs if mark == "@" else of(call).remake)[int(place)] = Decision(name, address)
        of(call).notes |= bool(notes)
        of(call).noted.update(map(int, filter(None, ordinals.strip().split(","))))
        of(call).shape |= node == SHAPE
    for call in replay:
        of(call).replay = True
    for call in advance:
        of(call).advance = True
    return table
