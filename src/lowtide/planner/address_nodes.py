"""Names that plans write at an address: the autograd node that recomputes the saved tensor, or a stand-in for one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

MASK: Final = "Mask"
"""What plans have in the place of an autograd node for a mask that is kept as bits."""
SIGNS: Final = "Signs"
"""The same for a tensor of which backward reads which elements are positive: these are kept as bits."""
SHAPE: Final = "Shape"
"""The same for a tensor of which backward reads only the shape."""

NOTED: Final = "+noted"
"""What plans have behind an autograd node whose recipe takes what has to be noted (`runtime/operand_capture.py`).
Behind it are the tensors that are held for that, by their ordinals in the call: `SoftmaxBackward0+noted 0,2`."""
OFFLOAD: Final = "Offload"
"""What plans have in the place of an autograd node for a tensor that waits in memory of the host."""


def with_noted(node: str, ordinals: Iterable[int]) -> str:
    """A node's name as plans write it if what its recipe takes has to be noted."""
    return f"{node}{NOTED} {','.join(map(str, sorted(ordinals)))}".rstrip()


def node_name(node: str) -> str:
    """The node's own name of what plans write."""
    return node.partition(NOTED)[0]


def names_at(slots: Iterable[tuple[str, int]], nodes: Mapping[int, str]) -> dict[str, str]:
    """What plans write for the address of each slot, given as address and value, in the order of a step.

    `nodes` are the names by value, with what has to be noted: that is in the call that saves the value first. Others
    that save it, too, note nothing for it.
    """
    found, first = dict[str, str](), dict[int, str]()
    for address, value in slots:
        if value in nodes:
            call = split_address(address)[0]
            name = nodes[value] if call == first.setdefault(value, call) else node_name(nodes[value])
            if address not in found or NOTED in name:
                found[address] = name
    return found


_CALL = r"[^\0]{0,4000}#[0-9]{1,9}"
_NAMED = {
    "recompute": re.compile(rf"{_CALL}[:@][0-9]{{1,9}}"),
    "offload": re.compile(rf"{_CALL}[:@][0-9]{{1,9}}"),
    "replay": re.compile(_CALL),
    "advance": re.compile(_CALL),
}
_WRITTEN = re.compile(rf"[^+\0]{{1,500}}(?:{re.escape(NOTED)}(?: [0-9]{{1,9}}(?:,[0-9]{{1,9}})*)?)?")


def check_names(kind: str, names: Iterable[str], written: Iterable[str] = ()) -> None:
    """Raise ValueError for a name that no plan has among its `kind`, or for what none has `written` at an address."""
    for name in names:
        if not _NAMED[kind].fullmatch(name):
            raise ValueError(f"{name[:100]!r} is no name of what a plan can {kind}")
    for node in written:
        if not _WRITTEN.fullmatch(node):
            raise ValueError(f"{node[:100]!r} is no autograd node")


def split_address(address: str) -> tuple[str, str, str]:
    """The call of an address, its mark and the number behind it."""
    call, mark, place = re.split(r"([:@])(?=\d+$)", address)
    return call, mark, place
