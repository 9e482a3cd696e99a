"""Decisions of a plan for each call of each module, by address: parsed once, not in every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import nn

from lowtide.planner.address_nodes import NOTED, OFFLOAD, SHAPE, split_address

if TYPE_CHECKING:
    from lowtide.runtime.recompute_path import RecomputePath


MOST_PATHS = 4
"""Number of runs in which the path to a recompute's operands may be learnt again; after that every run searches."""


class Decision:
    """Decision of a plan on the saved tensor at `address`.

    `node` names the autograd node whose recipe recomputes the tensor, or another way to free its memory, such as
    offload.
    """

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
    """Decisions of a plan for one call of one module: those on single saved tensors, by ordinal, and whether the call
    is replayed or advanced.
    """

    __slots__ = ("advance", "captured", "captures", "inputs", "recompute", "replay", "shape")

    def __init__(self) -> None:
        self.recompute: dict[int, Decision] = {}
        self.inputs: dict[int, Decision] = {}
        self.replay = False
        self.advance = False
        """True if the call's result is not kept, but recomputed by running the call's forward again."""
        self.captures = False
        """True if operands that autograd does not record are captured."""
        self.captured: set[int] = set()
        """Ordinals of the captured tensors that are held."""
        self.shape = False
        """True if only the shape of an input is held after the call."""

    def moved(self, path: str, to: str) -> Actions:
        """Return the same decisions, at addresses that begin with `to` instead of `path`."""
        actions = Actions()
        for name in Actions.__slots__:
            setattr(actions, name, getattr(self, name))
        for name in ("recompute", "inputs"):
            decisions: dict[int, Decision] = getattr(self, name)
            moved = {n: Decision(d.node, to + d.address.removeprefix(path)) for n, d in decisions.items()}
            setattr(actions, name, moved)
        return actions


NO_ACTIONS = Actions()


def parse_actions(
    recompute: Mapping[str, str], replay: Iterable[str], advance: Iterable[str] = (), offload: Iterable[str] = ()
) -> dict[str, dict[int, Actions]]:
    """Parse the addresses in a plan; return its decisions by module path and call number."""
    table: dict[str, dict[int, Actions]] = {}

    def of(call: str) -> Actions:
        path, _, number = call.rpartition("#")
        return table.setdefault(path, {}).setdefault(int(number), Actions())

    for address, node in {**dict.fromkeys(offload, OFFLOAD), **recompute}.items():
        call, kind, place = split_address(address)
        name, captures, ordinals = node.partition(NOTED)
        (of(call).inputs if kind == "@" else of(call).recompute)[int(place)] = Decision(name, address)
        of(call).captures |= bool(captures)
        of(call).captured.update(map(int, filter(None, ordinals.strip().split(","))))
        of(call).shape |= node == SHAPE
    for call in replay:
        of(call).replay = True
    for call in advance:
        of(call).advance = True
    return table


def with_like_blocks(model: nn.Module, table: Mapping[str, dict[int, Actions]]) -> dict[str, dict[int, Actions]]:
    """Return a copy of `table` in which each block without decisions gets those of another block of the same class in
    the same container.

    This is for steps that skip blocks at random, because a rehearsal may not have run every block.
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
