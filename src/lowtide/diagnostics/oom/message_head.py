"""The beginning of an out-of-memory message, by which it is found in a text."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MessageHead:
    """Beginning of a message, and its source. `kind` is "" if the first group of the pattern states it.

    No pattern matches more characters than `text_stream.LONGEST`.
    """

    words: tuple[str, ...]
    """Every match of the pattern contains one of them."""
    pattern: re.Pattern[str]
    kind: str
    form: str = ""
    """Versions that print it, or the program: a key of `known_sources.SOURCES`."""
    certain: bool = True


def head(words: str, pattern: str, kind: str, form: str = "", *, certain: bool = True) -> MessageHead:
    """Return a head; `words` are separated by bars."""
    return MessageHead(tuple(words.split("|")), re.compile(pattern), kind, form, certain)
