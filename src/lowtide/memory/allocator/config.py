"""Parse the settings of torch's CUDA caching allocator from the text that torch reads.

`PYTORCH_ALLOC_CONF` (or `PYTORCH_CUDA_ALLOC_CONF`, its older name) holds `key:value` pairs, as in
"expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]". The syntax was read in
c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.{h,cpp} of torch 2.13. Nonsense that torch lets pass
("64.5", "-1") is refused here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from lowtide.errors import LowtideError

MIB = 2**20
UNLIMITED = 2**64 - 1
"""torch's value for "no limit": the largest size_t."""

INTERVALS = 16
"""Number of size classes with a rounding of their own: up to 2 MiB, up to 4 MiB, ..., from 32 GiB."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that torch reads; the first one set wins."""

MIN_LARGE_ALLOC = 10 * MIB
"""Least size of a request that gets its own segment (kMinLargeAlloc)."""

_NO_EFFECT = (
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_use_background_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)
"""Keys that change speed, host memory, graph capture or the wording of an error, but no placement of device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """Settings of the allocator; the defaults are torch's. Sizes are bytes.

    `roundup_power2_divisions` has one entry for each of INTERVALS: the number of steps between one power of two and the
    next, 0 or 1 for rounding to 512 bytes.
    """

    expandable_segments: bool = False
    large_segment_size: int = 20 * MIB  # parsed first: torch tests the next two against it, in the order of the text
    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Parse the settings in `text`. Raises LowtideError for keys unknown to torch, naming the nearest key."""
        config = cls()
        for key, value in _pairs(text):
            if key in _READERS:
                config = _READERS[key](config, key, value)
            elif key not in _NO_EFFECT:
                _unknown(key, text)
        return config

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> AllocatorConfig:
        """Return the settings with which torch begins in this environment. Raises LowtideError for invalid ones."""
        return cls.parse(next((environment[name] for name in VARIABLES if name in environment), ""))

    def __str__(self) -> str:
        """Return text that `parse` and torch read; "" for the defaults."""
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return ",".join(f"{_KEYS.get(name, name)}:{_written(name, getattr(self, name))}" for name in changed)

    def find_divisions(self, n_bytes: int) -> int:
        """Return the entry of `roundup_power2_divisions` for a request of `n_bytes` bytes (at least 1 byte)."""
        return self.roundup_power2_divisions[min(max(n_bytes.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)]


_KEYS = {
    "max_split_size": "max_split_size_mb",
    "max_non_split_rounding": "max_non_split_rounding_mb",
    "large_segment_size": "large_segment_size_mb",
}

_Reader = Callable[[AllocatorConfig, str, str], AllocatorConfig]


def _pairs(text: str) -> list[tuple[str, str]]:
    bare = re.sub(r"\s", "", text)
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\]?|\])+", bare)  # at commas outside brackets
    pairs = []
    for part in parts:
        key, colon, value = part.partition(":")
        if not colon or not value:
            _refuse(key, value, "it has no value; write key:value, with commas between")
        pairs.append((key, value))
    return pairs


def _written(name: str, value: Any) -> str:
    if name in _KEYS:
        return str(value // MIB)
    if name == "roundup_power2_divisions":
        # A common number for all is written bare, unless it is 0: torch takes 0 in a list only.
        if len(set(value)) == 1:
            return str(value[0])
        return "[" + ",".join(f"{2**i}:{divisions}" for i, divisions in enumerate(value)) + "]"
    return str(value)


def _refuse(key: str, value: str, why: str) -> NoReturn:
    raise LowtideError(f"the allocator's setting {key}{':' + value if value else ''} cannot be read: {why}.")


def _unknown(key: str, text: str) -> NoReturn:
    known = [*_READERS, *_NO_EFFECT]
    near = difflib.get_close_matches(key, known, n=2)
    nearest = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(_READERS)}."
    raise LowtideError(f"the CUDA allocator has no setting {key!r}, found in {text!r}.\n  {nearest}")


def _whole(key: str, value: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        _refuse(key, value, f"{text!r} is not a whole number")
    return int(text)


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        _refuse(key, value, f"{value!r} is not a number")


def _backend(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    if value != "native":
        _refuse(key, value, "only the native backend is simulated; cudaMallocAsync leaves it to the driver")
    return config


def _expandable(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    if value not in ("True", "False"):
        _refuse(key, value, "torch reads True and False, with a capital")
    return replace(config, expandable_segments=value == "True")


def _parse_large_segment(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    n_bytes = _whole(key, value, value) * MIB
    if n_bytes <= MIN_LARGE_ALLOC:
        _refuse(key, value, "it must be more than 10, the largest request that is put into such a segment")
    return replace(config, large_segment_size=n_bytes)


def _max_split(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    return replace(config, max_split_size=_parse_segment_bound(config, key, value))


def _rounding(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    return replace(config, max_non_split_rounding=_parse_segment_bound(config, key, value))


def _parse_segment_bound(config: AllocatorConfig, key: str, value: str) -> int:
    n_mib = _whole(key, value, value)
    if n_mib * MIB < config.large_segment_size:
        _refuse(key, value, f"it must be at least large_segment_size_mb, {config.large_segment_size // MIB}")
    return min(n_mib, UNLIMITED // MIB) * MIB


def _garbage(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    threshold = _number(key, value)
    if not 0 < threshold < 1:
        _refuse(key, value, "it must lie between 0 and 1, both excluded")
    return replace(config, garbage_collection_threshold=threshold)


def _fraction(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    fraction = _number(key, value)
    if not 0 <= fraction <= 1:
        _refuse(key, value, "it must lie between 0 and 1")
    return replace(config, per_process_memory_fraction=fraction)


def _roundup(config: AllocatorConfig, key: str, value: str) -> AllocatorConfig:
    if not value.startswith("["):
        divisions = [_power_of_two(key, value, value)] * INTERVALS
        return replace(config, roundup_power2_divisions=tuple(divisions))
    if not value.endswith("]"):
        _refuse(key, value, "the list has no closing bracket")
    divisions = [0] * INTERVALS
    last = 0
    for n, pair in enumerate(value[1:-1].split(",")):
        start, colon, steps = pair.partition(":")
        if not colon:
            _refuse(key, value, f"{pair!r} is not of the form MiB:divisions")
        n_divisions = 0 if steps == "0" else _power_of_two(key, value, steps)
        if start == ">":  # all sizes above the last one named
            divisions[last + 1 :] = [n_divisions] * (INTERVALS - last - 1)
            continue
        last = min(_power_of_two(key, value, start).bit_length() - 1, INTERVALS - 1)
        if n == 0:  # the first holds for all smaller ones too
            divisions[:last] = [n_divisions] * last
        divisions[last] = n_divisions
    return replace(config, roundup_power2_divisions=tuple(divisions))


def _power_of_two(key: str, value: str, text: str) -> int:
    number = _whole(key, value, text)
    if number.bit_count() != 1:
        _refuse(key, value, f"{number} is not a power of two")
    return number


_READERS: dict[str, _Reader] = {
    "expandable_segments": _expandable,
    "max_split_size_mb": _max_split,
    "max_non_split_rounding_mb": _rounding,
    "large_segment_size_mb": _parse_large_segment,
    "garbage_collection_threshold": _garbage,
    "per_process_memory_fraction": _fraction,
    "roundup_power2_divisions": _roundup,
    "backend": _backend,
}
