"""Derive profiles of the step with gradients written in place: the same work with lower `base_bytes`.

A plan uses the first `n` entries of `Profile.in_place`, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.planner.records import Profile


def without_in_place(profile: Profile) -> Profile:
    """Return the profile without in-place gradients: in every plan each gradient has its own memory."""
    return replace(profile, in_place=(), allows_in_place=False)


def list_prefix_lengths(profile: Profile) -> Iterator[int]:
    """Yield each number of leading entries of `profile.in_place` that a plan may use.

    The first number covers only the entries without extra time; each further number covers one entry more.
    """
    free = next((n for n, group in enumerate(profile.in_place) if group.extra_ms), len(profile.in_place))
    yield from range(free, len(profile.in_place) + 1)


def collect_prefix_nodes(profile: Profile, n: int) -> dict[str, int]:
    """Map each kind of node in the first `n` entries of `profile.in_place` to the least bytes of a gradient that is
    written in place.
    """
    return {node: least for group in profile.in_place[:n] for node, least in group.nodes.items()}


def find_prefix_length(profile: Profile, nodes: frozenset[str]) -> int:
    """Return the `n` for which the first `n` entries of `profile.in_place` have exactly these kinds of nodes.

    Raises ValueError if there is no such `n`.
    """
    for n in range(len(profile.in_place) + 1):
        if collect_prefix_nodes(profile, n).keys() == nodes:
            return n
    raise ValueError(f"this profile does not say what in-place gradients save for just {', '.join(sorted(nodes))}")


def extra_ms(profile: Profile, n: int) -> float:
    """Return the extra time per step of writing the first `n` entries of `profile.in_place` in place."""
    return sum(group.extra_ms for group in profile.in_place[:n])


def with_in_place(profile: Profile, n: int) -> Profile:
    """Return a profile whose plain step writes the first `n` entries of `profile.in_place` in place.

    The extra time of writing these gradients in place is left out.
    """
    base = profile.base_bytes
    for group in profile.in_place[:n]:
        base = tuple(level - saved for level, saved in zip(base, group.saved_bytes, strict=True))
    return replace(profile, base_bytes=base, in_place=())
