"""Private names of torch: autograd nodes and their saved tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from torch.autograd.graph import Node


node_metadata: Callable[[Node], dict[Any, Any]] = operator.attrgetter("metadata")
"""Return `Node.metadata`, a dict that lives as long as the C++ node. torch 2.13 documents the attribute, but not that
it may hold data of other libraries.
"""


def get_output_metadata(node: Node, output: int) -> Any:
    """Return the `.shape`, `.dtype` and `.device` of a node's forward output. Relies on internals of torch 2.13."""
    return node._input_metadata[output]


def get_packet(func: Any) -> Any:
    """Return the operator to which an overload belongs; dispatch modes get overloads. Relies on internals of torch
    2.13, present since 1.12.
    """
    return func._overloadpacket


WITH_WORKSPACE = "MkldnnRnnLayerBackward0"
"""Name of the node of oneDNN's LSTM, which saves a workspace in uint8. Some bytes of the workspace are never written.
Read in torch 2.13.
"""


def is_workspace(tensor: torch.Tensor, node: str) -> bool:
    """Return True if a node with this name saves `tensor` as its workspace, which differs from run to run."""
    return tensor.dtype is torch.uint8 and node == WITH_WORKSPACE


SAVED = "_saved_"
"""Prefix of a node's attributes for saved tensors and constants; reading one runs the unpack hook. Read in torch 2.13;
present since 1.9.
"""


RAW_SAVED = "_raw_saved_"
"""Prefix of a node's attributes for the slots of saved tensors: see `get_saved_slot`. Read in torch 2.13; present since
1.9.
"""


def get_saved_slot(node: Node, attribute: str) -> Any:
    """Return the slot or slots of the saved tensors in `attribute`; None for constants. Runs no hook. Relies on
    internals of torch 2.13.

    A slot has `.data`, the tensor or a pack hook's result, and `.unpack_hook`, None if no hook packed the tensor.
    """
    return getattr(node, "_raw" + attribute, None)


def has_yet_to_save(node: Node, attribute: str) -> bool:
    """Return True if `node` has not yet saved the tensor in `attribute`; False if the tensor was freed. Relies on
    internals of torch 2.13.
    """
    slot = get_saved_slot(node, attribute)
    if slot is None or slot.data is not None or slot.unpack_hook is not None:
        return False
    try:
        return getattr(node, attribute) is None  # no hook is there that this read could run
    except RuntimeError:  # freed
        return False


def find_saved_slots(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield name and slot (see `get_saved_slot`) of each tensor that `node` has saved; runs no unpack hook. Relies on
    internals of torch 2.13.
    """
    for name in _list_raw_saved_names(type(node)):
        try:
            saved = getattr(node, name)
        except RuntimeError:  # a custom Function whose saved tensors were freed
            continue
        short = name.removeprefix("_raw_saved_")
        if isinstance(saved, tuple | list):
            yield from ((f"{short}[{index}]", slot) for index, slot in enumerate(saved))
        else:
            yield short, saved


def raw_saved(node: Node) -> Iterator[Any]:
    """Yield the tensors that `node` has saved, or pack hooks' results; runs no unpack hook. Relies on internals of
    torch 2.13.
    """
    for _, slot in find_saved_slots(node):
        yield slot.data


def n_slots(node: Node) -> int:
    """Return the number of tensors that nodes of this kind can save. Relies on internals of torch 2.13."""
    return len(_list_raw_saved_names(type(node)))


def _list_raw_saved_names(node_class: type) -> tuple[str, ...]:
    names = _names_of.get(node_class)
    if names is None:
        names = _names_of[node_class] = tuple(name for name in dir(node_class) if name.startswith("_raw_saved_"))
    return names


_names_of: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()  # weak: each custom Function creates a class


def sequence_number(node: Node) -> int:
    """Return the node's number in the order in which its thread created nodes; AccumulateGrad nodes have the largest.
    Relies on internals of torch 2.13.
    """
    return node._sequence_nr()


next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the `sequence_number` of the next autograd node made in this thread. Relies on internals of torch 2.13,
present since 1.4.
"""
