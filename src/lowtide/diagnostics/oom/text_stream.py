"""Search and cleaning of text that is read in pieces: only one piece and some thousand characters are in memory.

Every pattern matches a bounded number of characters, so the matches do not depend on where the pieces end. The work is
linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

PIECE = 1 << 18
"""Number of characters that are read at once."""
LONGEST = 5000
"""Largest number of characters of a match. Every message is shorter."""

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
"""Pattern of the prefix that launchers add to a line. One of its groups names the process that wrote the line."""


def parse_process(prefix: re.Match[str]) -> str:
    """Return the process named in a match of PREFIX: `rank 0`, `pid 3959`, `worker-1`."""
    kind = str(prefix.lastgroup)
    name = str(prefix[kind])
    return f"rank {name}" if kind.startswith("rank") else name.replace("pid=", "pid ")


_ANSI = re.compile(r"\x1b\[[0-9;]{0,60}[A-Za-z]")
_LONGEST_ANSI = 64
_LONGEST_LINE = 1 << 16
"""Length from which a line is read before its end has arrived."""


class PatternFinder:
    """Search for all matches of a pattern in a text that is read through a moving window.

    It finds the same matches as `finditer` in the whole text. Every match contains one of `words`; a window without
    them is not searched.
    """

    def __init__(self, pattern: re.Pattern[str], words: Sequence[str]) -> None:
        self._pattern, self._words = pattern, words
        self._next = 0
        """Position in the window where the search continues."""

    def find_new_matches(self, window: str, *, is_last: bool) -> Iterator[re.Match[str]]:
        """Yield the new matches, except those so close to the end of `window` that they may be incomplete."""
        stop = len(window) + 1 if is_last else len(window) - LONGEST
        if any(window.find(word, self._next) >= 0 for word in self._words):
            for match in self._pattern.finditer(window, self._next):
                if match.start() >= stop:
                    break
                self._next = match.end()
                yield match
        self._next = max(self._next, stop)

    def move_on(self, n: int) -> None:
        """Adjust the search position after the window has moved on by `n` characters."""
        self._next -= n


class LineJoiner:
    """Cleaner of text that is read in pieces. It removes escape codes, process prefixes and line breaks."""

    def __init__(self) -> None:
        self.processes: list[tuple[int, str]] = []
        """Positions in the joined text at which another process begins to write, each with the process."""
        self._n_joined = 0
        self._rest = ""
        self._in_line = False
        """True if the next piece continues a line."""
        self._has_begun = self._needs_space = False

    def clean(self, piece: str, *, is_last: bool) -> str:
        """Return the cleaned text that is complete after `piece`, the next part of the text."""
        text = self._rest + piece.replace("\0", "")
        end = len(text) if is_last else self._find_cut(text)
        text, self._rest = text[:end], text[end:]
        line, line_break, more = text.partition("\n") if self._in_line else ("", "", text)
        if text:
            self._in_line = not text.endswith("\n")
        parts = [self._join(line + line_break)]
        done = 0
        for prefix in PREFIX.finditer(more):
            process = parse_process(prefix)
            parts.append(self._join(more[done : prefix.start()]))
            done = prefix.end()
            if not self.processes or self.processes[-1][1] != process:
                self.processes.append((self._n_joined, process))
        parts.append(self._join(more[done:]))
        return "".join(parts)

    @staticmethod
    def _find_cut(text: str) -> int:
        """Return the position at which to cut `text`: after a line, or in a very long line, outside escape codes."""
        end = text.rfind("\n") + 1
        if len(text) - end < _LONGEST_LINE:
            return end
        colour = text.rfind("\x1b", len(text) - _LONGEST_ANSI)
        return len(text) if colour < 0 else colour

    def _join(self, text: str) -> str:
        if not text:
            return ""
        text = _ANSI.sub("", text)
        words = " ".join(text.split())
        space = " " if words and self._has_begun and (self._needs_space or text[0].isspace()) else ""
        self._needs_space = text[-1].isspace() if words else self._needs_space or bool(text)
        self._has_begun |= bool(words)
        self._n_joined += len(space + words)
        return space + words
