"""Text that comes piece by piece: searched and cleaned with no more of it in memory than a few thousand characters.

Every pattern that is searched for here matches a bounded number of characters, so that what a search finds depends on
so much text only, and not on where the pieces end. The work grows with the text and with nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

PIECE = 1 << 18
"""Characters that are read at once."""
LONGEST = 5000
"""Characters of the longest match, and more than the longest message."""

_PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]{0,60}m)*(?:\[(?:rank ?|default)\d+\]:|\(\w{1,200} pid=\d+[^)\n]{0,200}\)|\d+: (?=\[rank))\s?",
    re.MULTILINE,
)
_ANSI = re.compile(r"\x1b\[[0-9;]{0,60}[A-Za-z]")
_LONGEST_ANSI = 64
_LONGEST_LINE = 1 << 16
"""Characters of a line up to which the rest of it is waited for."""


class Finder:
    """Matches of a pattern, as `finditer` gives them, in a text of which a window moves on.

    `words` are such that every match has one of them: where none is in the window, nothing is searched.
    """

    def __init__(self, pattern: re.Pattern[str], words: Sequence[str]) -> None:
        self._pattern, self._words = pattern, words
        self._next = 0
        """Where in the window the search goes on."""

    def found(self, window: str, *, is_last: bool) -> Iterator[re.Match[str]]:
        """The new matches, but for those that begin where the rest of them may still be to come."""
        stop = len(window) + 1 if is_last else len(window) - LONGEST
        if any(window.find(word, self._next) >= 0 for word in self._words):
            for match in self._pattern.finditer(window, self._next):
                if match.start() >= stop:
                    break
                self._next = match.end()
                yield match
        self._next = max(self._next, stop)

    def move_on(self, n: int) -> None:
        """The window begins `n` characters later."""
        self._next -= n


class OneLine:
    """Text without colours, the prefixes of ranks, and line breaks."""

    def __init__(self) -> None:
        self._rest = ""
        self._in_line = False
        """Whether what comes next goes on with a line that has begun."""
        self._has_begun = self._needs_space = False

    def cleaned(self, piece: str, *, is_last: bool) -> str:
        """What is sure of the text after `piece`, behind what was given before."""
        text = self._rest + piece.replace("\0", "")
        end = len(text) if is_last else self._end(text)
        text, self._rest = text[:end], text[end:]
        line, line_break, more = text.partition("\n") if self._in_line else ("", "", text)
        if text:
            self._in_line = not text.endswith("\n")
        return self._joined(_ANSI.sub("", line + line_break + _PREFIX.sub("", more)))

    @staticmethod
    def _end(text: str) -> int:
        """Where `text` can be cut: behind a line, or in one that is very long, but not in a colour."""
        end = text.rfind("\n") + 1
        if len(text) - end < _LONGEST_LINE:
            return end
        colour = text.rfind("\x1b", len(text) - _LONGEST_ANSI)
        return len(text) if colour < 0 else colour

    def _joined(self, text: str) -> str:
        words = " ".join(text.split())
        space = " " if words and self._has_begun and (self._needs_space or text[0].isspace()) else ""
        self._needs_space = text[-1].isspace() if words else self._needs_space or bool(text)
        self._has_begun |= bool(words)
        return space + words
