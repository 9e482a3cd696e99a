"""Find the functions that render a record for people, so that records need not import their renderers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

LONGEST_REPR = 200
"""Largest number of characters of a record's `repr`, which notebooks and debuggers show in one line."""

_MODULES: dict[str, str] = {}
_HTML: list[str] = []


def register_renderers(modules: Mapping[str, str], html: str) -> None:
    """Register the modules that render records. A module is imported when its first record is shown.

    Args:
        modules: Class name -> module with a function `show(record) -> str`.
        html: Module with functions `fragment(record) -> str` and `page(record) -> str`, for all classes.
    """
    _MODULES.update(modules)
    _HTML[:] = [html]


def text_of(record: object) -> str:
    """Return the text that `print(record)` shows."""
    text = import_module(_MODULES[type(record).__name__]).show(record)
    assert isinstance(text, str)
    return text


class Displayed:
    """A mixin for objects that notebooks show as a picture or a table, and that can be written as a page."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows where this object ends a cell."""
        fragment = import_module(_HTML[0]).fragment(self)
        assert isinstance(fragment, str)
        return fragment

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a self-contained HTML page of this object; also write it to `path` if given."""
        page = import_module(_HTML[0]).page(self)
        assert isinstance(page, str)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


def format_repr(name: str, content: str) -> str:
    """Return `name(content)` in one line, with `content` cut so that the line has at most LONGEST_REPR characters."""
    content = " ".join(content.split())
    room = LONGEST_REPR - len(name) - 2
    return f"{name}({content if len(content) <= room else content[: room - 3] + '...'})"
