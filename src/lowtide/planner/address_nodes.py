"""Names that plans write for an address: the node whose recipe recomputes the saved tensor, or a name defined below."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

MASK: Final = "Mask"
"""Written instead of an autograd node for a mask that is kept as bits."""
INDICES: Final = "Indices"
"""Written for indices, such as those of max pooling, that are kept in as few bytes as they need."""
SIGNS: Final = "Signs"
"""Written for a tensor whose signs are all that backward reads: one bit per element is kept."""
SHAPE: Final = "Shape"
"""Written for a tensor whose shape is all that backward reads."""

NOTED: Final = "+noted"
"""Suffix of an autograd node whose recipe takes operands that must be captured (`runtime/operand_capture.py`). The
tensors held for that follow, by their ordinals in the call: `SoftmaxBackward0+noted 0,2`.
"""
OFFLOAD: Final = "Offload"
"""Written for a tensor that is offloaded to host memory."""


def with_captured_operands(node: str, ordinals: Iterable[int]) -> str:
    """Return a node's name as plans write it if its recipe takes captured operands."""
    return f"{node}{NOTED} {','.join(map(str, sorted(ordinals)))}".rstrip()


def node_name(node: str) -> str:
    """Return the node's own name, without the suffix that plans write."""
    return node.partition(NOTED)[0]


def names_at(slots: Iterable[tuple[str, int]], nodes: Mapping[int, str]) -> dict[str, str]:
    """Return the name that plans write for each address, given slots as (address, value) in the order of a step.

    `nodes` are the names by value, captured operands included. Only the call that saves a value first captures operands
    for it; later calls that save the same value do not.
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
    """Raise ValueError for a name that is invalid for decisions of `kind`, or an invalid node in `written`."""
    for name in names:
        if not _NAMED[kind].fullmatch(name):
            raise ValueError(f"{name[:100]!r} is no name of what a plan can {kind}")
    for node in written:
        if not _WRITTEN.fullmatch(node):
            raise ValueError(f"{node[:100]!r} is not an autograd node")


def split_address(address: str) -> tuple[str, str, str]:
    """Return an address's call, its mark and the number behind the mark."""
    call, mark, place = re.split(r"([:@])(?=\d+$)", address)
    return call, mark, place
