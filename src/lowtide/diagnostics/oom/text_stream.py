"""Text in pieces: searched and cleaned with a few thousand characters in memory.

Every pattern searched for here matches a bounded number of characters, so matches do not depend on where the pieces
end. The work is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

PIECE = 1 << 18
"""Characters read at once."""
LONGEST = 5000
"""Characters of the longest match; more than the longest message."""

PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]{0,60}m)*(?:\d{1,6}: )?"
    r"(?:\[(?:rank ?|default)(\d{1,6})\]:|\(\w{1,200} pid=\d+[^)\n]{0,200}\))\s?",
    re.MULTILINE,
)
"""The prefix that launchers put before a line; the first group is the rank."""
_ANSI = re.compile(r"\x1b\[[0-9;]{0,60}[A-Za-z]")
_LONGEST_ANSI = 64
_LONGEST_LINE = 1 << 16
"""Characters up to which the end of a line is waited for."""


class PatternFinder:
    """Matches of a pattern, as `finditer` finds them, in a text read through a moving window.

    Every match contains one of `words`: a window without them is not searched.
    """

    def __init__(self, pattern: re.Pattern[str], words: Sequence[str]) -> None:
        self._pattern, self._words = pattern, words
        self._next = 0
        """Position in the window where the search continues."""

    def found(self, window: str, *, is_last: bool) -> Iterator[re.Match[str]]:
        """Yield the new matches, except those that begin where their rest may still be missing."""
        stop = len(window) + 1 if is_last else len(window) - LONGEST
        if any(window.find(word, self._next) >= 0 for word in self._words):
            for match in self._pattern.finditer(window, self._next):
                if match.start() >= stop:
                    break
                self._next = match.end()
                yield match
        self._next = max(self._next, stop)

    def move_on(self, n: int) -> None:
        """Move the window on by `n` characters."""
        self._next -= n


class LineJoiner:
    """Text without colours, prefixes of ranks, and line breaks."""

    def __init__(self) -> None:
        self.ranks: list[tuple[int, int]] = []
        """Positions in the joined text from which on another rank speaks, each with the rank."""
        self._n_joined = 0
        self._rest = ""
        self._in_line = False
        """True if the next piece continues a line."""
        self._has_begun = self._needs_space = False

    def cleaned(self, piece: str, *, is_last: bool) -> str:
        """Return the part of the text that `piece` completes."""
        text = self._rest + piece.replace("\0", "")
        end = len(text) if is_last else self._end(text)
        text, self._rest = text[:end], text[end:]
        line, line_break, more = text.partition("\n") if self._in_line else ("", "", text)
        if text:
            self._in_line = not text.endswith("\n")
        parts = [self._joined(line + line_break)]
        done = 0
        for prefix in PREFIX.finditer(more):
            rank = None if prefix[1] is None else int(prefix[1])
            parts.append(self._joined(more[done : prefix.start()]))
            done = prefix.end()
            if rank is not None and (not self.ranks or self.ranks[-1][1] != rank):
                self.ranks.append((self._n_joined, rank))
        parts.append(self._joined(more[done:]))
        return "".join(parts)

    @staticmethod
    def _end(text: str) -> int:
        """Return where `text` can be cut: after a line, or within a very long one, but not within a colour."""
        end = text.rfind("\n") + 1
        if len(text) - end < _LONGEST_LINE:
            return end
        colour = text.rfind("\x1b", len(text) - _LONGEST_ANSI)
        return len(text) if colour < 0 else colour

    def _joined(self, text: str) -> str:
        if not text:
            return ""
        text = _ANSI.sub("", text)
        words = " ".join(text.split())
        space = " " if words and self._has_begun and (self._needs_space or text[0].isspace()) else ""
        self._needs_space = text[-1].isspace() if words else self._needs_space or bool(text)
        self._has_begun |= bool(words)
        self._n_joined += len(space + words)
        return space + words
