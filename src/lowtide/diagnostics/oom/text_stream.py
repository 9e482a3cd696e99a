"""Text read in pieces: searched and cleaned with one piece, and some thousand characters before it, in memory.

Every pattern searched for here matches a bounded number of characters, so matches do not depend on where the pieces
end. The work is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

PIECE = 1 << 18
"""Number of characters that are read at once."""
LONGEST = 5000
"""Largest number of characters of a match, which is more than the longest message has."""

PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]{0,60}m)*(?:\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)? )?"
    r"(?:(?: {0,5}\d{1,6}: )?\[(?:[Rr]ank ?|default)(?P<rank>\d{1,6})\]:?"  # torchrun
    r"|\[(?:\d{1,3},)?(?P<rank_of_tee>\d{1,6})\](?:<std(?:out|err)>)?:"  # accelerate, mpirun
    r"| {0,5}(?P<rank_of_task>\d{1,6}):(?= )"  # srun --label
    r"|\(\w{1,200} (?:rank=\d{1,6} )?(?P<pid>pid=\d{1,10})[^)\n]{0,200}\)"  # Ray, vLLM
    r"|\[(?P<pod>pod/[\w.-]{1,200})[^\]\n]{0,200}\]"  # kubectl logs --prefix
    r"|(?P<host>[\w.-]{0,80}[-_.]\d{1,5})(?: {1,40}\||:(?= )))\s?",  # docker compose, pdsh
    re.MULTILINE,
)
"""The prefix that launchers put before a line. One of its groups names the process that wrote it."""


def parse_process(prefix: re.Match[str]) -> str:
    """Return the process that a match of PREFIX names: `rank 0`, `pid 3959`, `worker-1`."""
    kind = str(prefix.lastgroup)
    name = str(prefix[kind])
    return f"rank {name}" if kind.startswith("rank") else name.replace("pid=", "pid ")


_ANSI = re.compile(r"\x1b\[[0-9;]{0,60}[A-Za-z]")
_LONGEST_ANSI = 64
_LONGEST_LINE = 1 << 16
"""Largest length of a line that is read only once its end has arrived."""


class PatternFinder:
    """Finder of a pattern's matches, the same as by `finditer`, in a text read through a moving window.

    Every match contains one of `words`: a window without them is not searched.
    """

    def __init__(self, pattern: re.Pattern[str], words: Sequence[str]) -> None:
        self._pattern, self._words = pattern, words
        self._next = 0
        """Position in the window where the search continues."""

    def find_new_matches(self, window: str, *, is_last: bool) -> Iterator[re.Match[str]]:
        """Yield the new matches, except those so close to the end of the window that text may still be missing."""
        stop = len(window) + 1 if is_last else len(window) - LONGEST
        if any(window.find(word, self._next) >= 0 for word in self._words):
            for match in self._pattern.finditer(window, self._next):
                if match.start() >= stop:
                    break
                self._next = match.end()
                yield match
        self._next = max(self._next, stop)

    def move_on(self, n: int) -> None:
        """Adjust positions to a window whose beginning has moved on by `n` characters."""
        self._next -= n


class LineJoiner:
    """Cleaner of text that is read in pieces: removes colours, process prefixes and line breaks."""

    def __init__(self) -> None:
        self.processes: list[tuple[int, str]] = []
        """Positions in the joined text at which another process begins to write, each with the process."""
        self._n_joined = 0
        self._rest = ""
        self._in_line = False
        """True if the next piece continues a line."""
        self._has_begun = self._needs_space = False

    def cleaned(self, piece: str, *, is_last: bool) -> str:
        """Return the cleaned text that is complete with `piece`, the next part of the text."""
        text = self._rest + piece.replace("\0", "")
        end = len(text) if is_last else self._end(text)
        text, self._rest = text[:end], text[end:]
        line, line_break, more = text.partition("\n") if self._in_line else ("", "", text)
        if text:
            self._in_line = not text.endswith("\n")
        parts = [self._joined(line + line_break)]
        done = 0
        for prefix in PREFIX.finditer(more):
            process = parse_process(prefix)
            parts.append(self._joined(more[done : prefix.start()]))
            done = prefix.end()
            if not self.processes or self.processes[-1][1] != process:
                self.processes.append((self._n_joined, process))
        parts.append(self._joined(more[done:]))
        return "".join(parts)

    @staticmethod
    def _end(text: str) -> int:
        """Return a position to cut `text` at: after a line, or inside a very long line, but not inside a colour."""
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
