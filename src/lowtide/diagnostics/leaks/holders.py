"""Holders of tensors: named objects that keep tensors alive, and their descriptions for people."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import NamedTuple

from torch.autograd.function import BackwardCFunction

from lowtide.diagnostics.leaks.call_site import Place
from lowtide.diagnostics.leaks.reference_path import CACHED, ENTRIES, ReferencePath, attribute_name
from lowtide.diagnostics.leaks.stored_values import find_value_place
from lowtide.diagnostics.leaks.variable_reads import Reads

RANK = (
    "exception",
    "notebook",
    "hook",
    "module",
    "context",
    "closure",
    "generator",
    "class",
    "context variable",
    "variable",
    "gradient",
    "iterator",
    "cycle",
)
"""Kinds of holders in order of precedence. If a tensor has several holders, the one of the first kind is reported."""


class StoredIn(NamedTuple):
    """A variable or attribute that stores tensors, and the file whose code assigns it or adds to it."""

    file: str
    name: str
    part: str
    """The part of each entry of the container that holds the tensors, as code: `[1]` or `['logits']`; else empty."""
    is_container: bool

    def find_value_place(self) -> Place | None:
        """Return the line of code that computes the stored value; None if it is not found."""
        return find_value_place(self.file, self.name, self.part, is_container=self.is_container)


def stored_in(way: ReferencePath, name: str, file: str) -> StoredIn:
    """Return the variable or attribute that source code assigns or adds to when it stores the tensors.

    `way` is the path of references to the tensors. It begins at the variable or attribute `name` of code in `file`.
    """
    attributes = [attribute_name(step) for step in takewhile(lambda step: step.startswith("."), way.path)]
    part = way.path[-1] if len(way.path) > 1 and ENTRIES.fullmatch(way.path[-2]) else ""
    own_file = way.file if attributes and way.file else file
    return StoredIn(own_file, attributes[-1] if attributes else name, part, bool(way.containers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Named object that keeps tensors alive. `text` describes it to people; `key` identifies it in all steps."""

    kind: str
    text: str
    key: str
    name: str = ""
    owner: str = ""
    """The object whose attribute holds the tensors, as code; else `name`."""
    container: str = ""
    """The outermost container on the path whose entries have no names, as code after the name of its file or class."""
    containers: Mapping[int, int] = field(default_factory=dict)
    """All unbounded lists, dicts and sets on the path -> numbers of their entries."""
    gathers: bool = False
    """True for a list, or another container whose entries have no names."""
    is_keyed: bool = False
    """True for a dict, or for the cache of a function."""
    is_part: bool = False
    """True if an entry or attribute of the named variable refers to the tensors, not the variable itself."""
    part: str = ""
    """The entry or attribute that refers to the tensors, as code: `state['logits']`, `items[..].embedding`."""
    is_cache: bool = False
    """True for a function with a cache of its results."""
    is_cycle: bool = False
    """True for an `itertools.cycle`, which keeps every item of its first round."""
    is_tee: bool = False
    """True for an `itertools.tee`, which keeps each item until all its iterators have returned it."""
    place: Place | None = None
    stored_in: StoredIn | None = None
    """The variable or attribute that the source code assigns to store the tensors, if known."""
    reads: Reads = Reads.NONE
    """Later reads of the variable, which a `del` would break."""
    is_state: bool = False
    """True for an attribute of a module, or a variable of a loop, that is read before it is assigned and so carries
    state from step to step.
    """

    @property
    def is_part_of_entries(self) -> bool:
        """True if parts of a container's entries refer to the tensors, not the entries themselves."""
        return bool(self.stored_in and self.stored_in.part)


def make_context_holder(way: ReferencePath, context: BackwardCFunction) -> Holder:
    """Make the holder for an attribute of `context`, the ctx of a custom autograd Function.

    `way` is the path of references from the attribute to the tensors.
    """
    attribute = attribute_name(way.path[0]) if way.path else "?"
    of = type(context).__name__.removesuffix("Backward")
    text = f"ctx attribute '{attribute}' of {of}"
    return Holder(kind="context", text=text, key=f"ctx {of} {attribute}", name=attribute)


def make_context_variable_holder(way: ReferencePath, inner: ReferencePath) -> Holder | None:
    """Make the holder for a `ContextVar` whose value leads to tensors; return None if `way` has not reached one.

    `way` is `inner`, extended outwards to a node of the tree inside a `contextvars.Context`. Upper nodes of the tree
    refer to other nodes, not to variables.
    """
    referents = gc.get_referents(way.obj)  # in reverse order, each value before its variable
    for value, variable in pairwise(referents):
        if value is inner.obj and isinstance(variable, ContextVar):
            _, full_name, grouped = way.shown(f"{variable.name}.get()", "")
            return Holder(
                kind="context variable",
                text=f"context variable '{variable.name}'" + (f" -> {way.text}" if way.path else ""),
                key=f"context variable {grouped}",
                name=full_name,
                container=way.find_outermost_container(f"context variable {variable.name}"),
                containers=way.containers,
                is_keyed=way.is_keyed,
                gathers=way.gathers,
                is_part=bool(way.path),
            )
    return None


def make_class_holder(way: ReferencePath, kind: type) -> Holder:
    """Make the holder for a class attribute of `kind`.

    `way` is the path from the class to the tensors. Its first element, the attribute, is removed.
    """
    name = f"{kind.__qualname__}.{attribute_name(way.path[0]) if way.path else '?'}"
    way.path = way.path[1:]
    _, full_name, grouped = way.shown(name, "")
    arrow = " -> " if CACHED in way.path else ""
    return Holder(
        kind="class",
        text=f"class attribute {name}{arrow}{way.text}",
        key=f"class attribute {grouped}",
        name=full_name,
        container=way.find_outermost_container(f"class {name}"),
        containers=way.containers,
        is_keyed=way.is_keyed,
        is_cache=CACHED in way.path,
    )
