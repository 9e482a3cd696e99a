"""Find the function that renders a record as text, so that records need not import their renderers."""

from collections.abc import Mapping
from importlib import import_module

_MODULES: dict[str, str] = {}


def register_renderers(modules: Mapping[str, str]) -> None:
    """Name the module that shows each class of records: it is imported when the first record of the class is shown.

    Args:
        modules: Class name -> module with a function `show(record) -> str`.
    """
    _MODULES.update(modules)


def text_of(record: object) -> str:
    """Return the text that `print(record)` shows."""
    text = import_module(_MODULES[type(record).__name__]).show(record)
    assert isinstance(text, str)
    return text
