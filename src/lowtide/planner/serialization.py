"""Base class of all records: frozen, and written to and read from JSON."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import msgspec

from lowtide.errors import LowtideError
from lowtide.memory.untrusted_files import check_numbers, in_one_line, unpacked
from lowtide.utils.rendering import Displayed, format_repr

FORMAT = 3
"""Format of plans and profiles that this version writes, and the only one that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Record(Displayed):
    """A frozen record that can be written to and read from JSON. Its `repr` is one short line."""

    def __init_subclass__(cls) -> None:
        if "__repr__" not in vars(cls):
            cls.__repr__ = Record.__repr__  # type: ignore[method-assign]  # else dataclass writes one of any length

    def __repr__(self) -> str:
        return format_repr(type(self).__name__, self._summary())

    def _summary(self) -> str:
        """Return the text between the parentheses of the `repr`: each field, but only the lengths of containers."""
        return ", ".join(f"{field.name}={_brief(getattr(self, field.name))}" for field in fields(self))

    def to_json(self, path: str | Path | None = None) -> str:
        """Return this record as JSON text; also write it to `path` if given."""
        text = msgspec.json.format(msgspec.json.encode(self._written()), indent=1).decode()
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Self:
        """Return the record in `source`: JSON text, or the path of a file that holds it.

        Raises LowtideError when the text is not this kind of record.
        """
        is_text = isinstance(source, str) and source.lstrip().startswith("{")
        name, text = cls.__name__, b""
        try:
            text = str(source).encode() if is_text else unpacked(Path(source))
            if (written := _read_format(text)) not in (None, FORMAT):
                raise ValueError(f"it has format {written}, which another version of Lowtide wrote")
            record = cls._read(text)
            check_numbers(record)
        except OSError as error:
            raise LowtideError(f"no {name} could be read: {error}. Give JSON text or the path of a file.") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            problem = (
                f"but a {kind}"
                if (kind := kind_of(text)) not in (None, name)
                else f"of format {FORMAT}: {in_one_line(str(error))}"
            )
            this = "this" if is_text else str(source)
            command = f", or with `{_COMMANDS[name]}`" if name in _COMMANDS else ""
            raise LowtideError(
                f"{this} is not a {name} {problem}.\n  Write one with `{name.lower()}.to_json(path)`{command}."
            ) from error
        return record

    @classmethod
    def expect(cls, obj: object, by: str) -> Self:
        """Return `obj` if it is a record of this class, else raise LowtideError.

        `by` is the name of the calling function, for the message.
        """
        if not isinstance(obj, cls):
            hint = f"; {cls.__name__}.from_json(path) reads one" if isinstance(obj, str | os.PathLike) else ""
            raise LowtideError(f"{by} takes a {cls.__name__}, found {type(obj).__name__}{hint}.")
        return obj

    def _written(self) -> object:
        """Return the object that `to_json` encodes: this record, or its fields in another form."""
        return self

    @classmethod
    def _read(cls, text: bytes) -> Self:
        return msgspec.json.decode(text, type=cls)


def _brief(value: object) -> str:
    if isinstance(value, tuple | list | dict | frozenset):
        return f"<{len(value)}>"
    return type(value).__name__ if isinstance(value, Record) else repr(value)


_COMMANDS = {
    "Profile": "lowtide rehearse --json FILE SCRIPT",
    "Plan": "lowtide plan make --budget AMOUNT -o FILE SCRIPT",
    "Frontier": "lowtide frontier --json FILE SCRIPT",
    "RunRecord": "lowtide run --budget AMOUNT --report FILE.json SCRIPT",
}
_FIELD_OF_KIND = {
    "command": "RunRecord",
    "storages": "Profile",
    "decisions": "Plan",
    "points": "Frontier",
    "runs": "Comparison",
    "measured_peak_bytes": "Verdict",
}
"""Kinds of records that are saved in files, by a field that no other kind has."""


def kind_of(text: bytes) -> str | None:
    """Return the class name of the record in a JSON text, such as "Plan"; None for any other text."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return next((kind for field, kind in _FIELD_OF_KIND.items() if field in fields), None)


class _Versioned(msgspec.Struct):
    """The format number of a record, the only field that records of all formats have."""

    format: int | None = None


def _read_format(text: bytes) -> int | None:
    """Return the number in the field `format` of a JSON text; None if it has no such field."""
    try:
        return msgspec.json.decode(text, type=_Versioned).format
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
