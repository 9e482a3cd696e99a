"""Tensors beside others: as many, under the same names, and equal."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def equal(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return True if each tensor, or None, is equal to the one at its place in `other`, or of its name.

    Raises ValueError where one has more than the other or other names: a comparison that leaves something out proves
    nothing.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            raise ValueError(f"only one of the two has {sorted(map(str, one.keys() ^ other.keys()))}")
        one, other = one.values(), [other[name] for name in one]
    pairs = list(zip(one, other, strict=True))  # before anything is compared
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
