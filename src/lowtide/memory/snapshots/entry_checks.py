"""Check an untrusted snapshot once: fields that are read later must have the right types, and sizes within limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lowtide.errors import LowtideError
from lowtide.memory.allocator.config import VARIABLES
from lowtide.memory.untrusted_files import in_one_line

MOST_DEVICES = 128
"""Largest number of devices in a snapshot: PyTorch numbers them in 8 bits."""
MOST_BYTES = 2**48
"""Largest number of bytes in a snapshot, more than any device has."""
MOST_NUMBER = 2**64
"""Largest address, stream or time in a snapshot."""
ENTRY_BYTES = 16
"""Least bytes of a segment, block or action in a file. A file that lists more entries than its size has room for
repeats some by reference.
"""
LONGEST_SETTINGS = 10_000

_NUMBERS = {
    **dict.fromkeys(("address", "addr", "stream", "time_us"), MOST_NUMBER),
    **dict.fromkeys(("size", "requested_size", "total_size"), MOST_BYTES),
    "device": MOST_DEVICES,
}
_TEXTS = ("action", "state", "segment_type", "stage", "name", "filename", "category")


def check(record: Mapping[str, Any], n_bytes: int | None = None) -> None:
    """Raise LowtideError if a field of `record` has a wrong type or size, or it can't be from a file of `n_bytes`."""
    traces = _list(record.get("device_traces", []), "device_traces")
    if len(traces) > MOST_DEVICES:
        raise _other(f"it has {len(traces)} devices, of at most {MOST_DEVICES}")
    entries = {
        "segment": record["segments"],
        "annotation": _list(record.get("external_annotations") or [], "annotations"),
    }
    entries |= {f"action of device {number}": _list(trace, "a device's trace") for number, trace in enumerate(traces)}
    count = sum(map(len, entries.values()))
    for segment in record["segments"]:
        if not isinstance(segment, Mapping):
            raise _other(f"it has a segment of type {type(segment).__name__}")
        count += len(_list(segment.get("blocks", []), "a segment's blocks"))
    if n_bytes is not None and count * ENTRY_BYTES > n_bytes:
        raise _other(f"it lists {count} entries, many of them several times: its {n_bytes} bytes have room for fewer")
    known: set[int] = set()
    for kind, group in entries.items():
        _check_all(group, kind, known)
    for segment in record["segments"]:
        _check_all(segment.get("blocks", []), "block", known)
    settings = record.get("allocator_settings") or {}
    if not isinstance(settings, Mapping):
        raise _other(f"its allocator_settings are of type {type(settings).__name__}")
    for text in (settings[name] for name in VARIABLES if name in settings):
        if not isinstance(text, str) or len(text) > LONGEST_SETTINGS:
            raise _other(f"its allocator_settings have {in_one_line(repr(text)[:80])} where text was expected")


def _check_all(entries: Iterable[Any], kind: str, known: set[int]) -> None:
    """Check the fields of entries and of their stacks; `known` are the ids of stacks that were checked already."""
    for entry in entries:
        _check_fields(entry, kind)
        frames = entry.get("frames") or ()
        if frames and id(frames) not in known:
            known.add(id(frames))
            for frame in _list(frames, f"frames of a {kind}"):
                _check_fields(frame, "frame")


def _check_fields(entry: Any, kind: str) -> None:
    if not isinstance(entry, Mapping):
        raise _other(f"it has a {kind} of type {type(entry).__name__}")
    for name, value in entry.items():
        if (most := _NUMBERS.get(name)) is not None:
            if type(value) is not int or not 0 <= value < most:
                raise _other(
                    f"the {name} of a {kind} is {_shown(value)}, where a whole number below {most} was expected"
                )
        elif name in _TEXTS and not isinstance(value, str):
            raise _other(f"the {name} of a {kind} is {_shown(value)}, where text was expected")


def _shown(value: object) -> str:
    if isinstance(value, float | bool) or (isinstance(value, int) and value.bit_length() < 1000):
        return str(value)
    return f"a large {type(value).__name__}" if isinstance(value, int) else f"of type {type(value).__name__}"


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _other(f"{name} are of type {type(value).__name__}, where a list was expected")
    return value


def _other(why: str) -> LowtideError:
    return LowtideError(f"this is not a memory snapshot: {why}.")
