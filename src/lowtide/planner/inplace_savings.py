"""Profiles of the step with gradients written in place: the same work with lower `base_bytes`.

`Profile.in_place` is taken from its beginning on: its first `n`, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.planner.records import Profile


def without_in_place(profile: Profile) -> Profile:
    """The same step with each gradient in memory of its own, in every plan."""
    return replace(profile, in_place=(), allows_in_place=False)


def numbers(profile: Profile) -> Iterator[int]:
    """How many of `profile.in_place` a plan may have: all that cost nothing, and then one more each time."""
    free = next((n for n, each in enumerate(profile.in_place) if each.extra_ms), len(profile.in_place))
    yield from range(free, len(profile.in_place) + 1)


def nodes_of(profile: Profile, n: int) -> dict[str, int]:
    """The kinds of nodes in the first `n`, with the bytes from which on their gradients are written in place."""
    return {node: least for each in profile.in_place[:n] for node, least in each.nodes.items()}


def number_of(profile: Profile, nodes: frozenset[str]) -> int:
    """How many these are. Raises ValueError for what the profile does not know."""
    for n in range(len(profile.in_place) + 1):
        if nodes_of(profile, n).keys() == nodes:
            return n
    raise ValueError(f"this profile says nothing of gradients in place for just {', '.join(sorted(nodes))}")


def extra_ms(profile: Profile, n: int) -> float:
    """What the first `n` take a step."""
    return sum(each.extra_ms for each in profile.in_place[:n])


def with_in_place(profile: Profile, n: int) -> Profile:
    """The step with the first `n`: they are part of its plain step then, and what they take is nowhere in it."""
    base = profile.base_bytes
    for each in profile.in_place[:n]:
        base = tuple(level - saved for level, saved in zip(base, each.saved_bytes, strict=True))
    return replace(profile, base_bytes=base, in_place=())
