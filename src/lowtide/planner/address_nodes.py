"""Names that a plan writes beside the address of a saved tensor: the autograd node whose recipe recomputes the tensor,
or one of the constants below.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

MASK: Final = "Mask"
"""Written instead of an autograd node for a mask that is kept as bits."""
INDICES: Final = "Indices"
"""Written for indices, such as those of max pooling, that are kept in as few bytes as they need."""
SIGNS: Final = "Signs"
"""Written for a tensor of which backward reads only the signs: one bit per element is kept."""
SHAPE: Final = "Shape"
"""Written for a tensor of which backward reads only the shape."""

NOTED: Final = "+noted"
"""Suffix of an autograd node whose recipe takes operands that must be captured (`runtime/operand_capture.py`). The
captured tensors follow, each as its ordinal in the module call: `SoftmaxBackward0+noted 0,2`.
"""
OFFLOAD: Final = "Offload"
"""Written for a tensor that is offloaded to host memory."""


def with_captured_operands(node: str, ordinals: Iterable[int]) -> str:
    """Return a node's name with the suffix for captured operands and their ordinals: `SoftmaxBackward0+noted 0,2`."""
    return f"{node}{NOTED} {','.join(map(str, sorted(ordinals)))}".rstrip()


def node_name(node: str) -> str:
    """Return the name of an autograd node without the suffix for captured operands."""
    return node.partition(NOTED)[0]


def names_at(slots: Iterable[tuple[str, int]], nodes: Mapping[int, str]) -> dict[str, str]:
    """Return the node name that a plan writes for each address. `slots` are pairs (address, value) in the order of a
    step.

    `nodes` maps values to names, with the suffix for captured operands. Only the first call that saves a value captures
    operands for it, so its addresses in later calls get the name without the suffix.
    """
    names, first = dict[str, str](), dict[int, str]()
    for address, value in slots:
        if value in nodes:
            call = split_address(address)[0]
            name = nodes[value] if call == first.setdefault(value, call) else node_name(nodes[value])
            if address not in names or NOTED in name:
                names[address] = name
    return names


_CALL = r"[^\0]{0,4000}#[0-9]{1,9}"
_NAMED = {
    "recompute": re.compile(rf"{_CALL}[:@][0-9]{{1,9}}"),
    "offload": re.compile(rf"{_CALL}[:@][0-9]{{1,9}}"),
    "replay": re.compile(_CALL),
    "advance": re.compile(_CALL),
}
_WRITTEN = re.compile(rf"[^+\0]{{1,500}}(?:{re.escape(NOTED)}(?: [0-9]{{1,9}}(?:,[0-9]{{1,9}})*)?)?")


def check_names(kind: str, names: Iterable[str], written: Iterable[str] = ()) -> None:
    """Check text from a plan's file. Raises ValueError for an invalid address or call id, or an invalid node name.

    `names` are the addresses or call ids in decisions of `kind`: "recompute", "offload", "replay" or "advance".
    `written` are names of autograd nodes.
    """
    for name in names:
        if not _NAMED[kind].fullmatch(name):
            raise ValueError(f"{name[:100]!r} is no name of what a plan can {kind}")
    for node in written:
        if not _WRITTEN.fullmatch(node):
            raise ValueError(f"{node[:100]!r} is not an autograd node")


def split_address(address: str) -> tuple[str, str, str]:
    """Split an address into call, mark (`:`, or `@` for a replay's input) and ordinal: `a#0:1` -> `a#0`, `:`, `1`."""
    call, mark, place = re.split(r"([:@])(?=\d+$)", address)
    return call, mark, place
