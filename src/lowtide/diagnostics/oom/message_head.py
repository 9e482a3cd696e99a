"""The beginning of an out-of-memory message, by which the message is found in a text."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageHead:
    """Pattern of the beginning of an out-of-memory message, and the program that prints it.

    `kind` is "" if the first group of the pattern states the kind of memory. No pattern matches more characters than
    `text_stream.LONGEST`.
    """

    words: tuple[str, ...]
    """Every match of the pattern contains one of these words."""
    pattern: re.Pattern[str]
    kind: str
    form: str = ""
    """Versions that print the message, or the program: a key of `known_sources.SOURCES`."""
    certain: bool = True


def head(words: str, pattern: str, kind: str, form: str = "", *, certain: bool = True) -> MessageHead:
    """Make a message head. `words` are separated by `|`, and every match of `pattern` contains one of them."""
    return MessageHead(tuple(words.split("|")), re.compile(pattern), kind, form, certain)
