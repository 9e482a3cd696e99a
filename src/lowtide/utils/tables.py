"""Tables for people, from one description: aligned text for a terminal, and HTML for a page."""

from __future__ import annotations

import html
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_WIDE = 6
"""Smallest number of columns at which a page stacks the cells of each row on a phone."""


class Styled(NamedTuple):
    """Text of a table cell, and the CSS class that it gets in HTML."""

    text: str
    css_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of plain text: column headings, and rows whose first cells are the rows' headings. Columns whose index is
    in `left` are left-aligned.

    On a phone, an HTML page stacks the cells of each row if the table is wide, or if `is_stacked`.
    """

    headings: tuple[str, ...]
    rows: Sequence[Sequence[str | Styled]]
    left: frozenset[int] = frozenset({0})
    is_stacked: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the headings and the rows as text, without escape codes."""
        yield from aligned([self.headings, *([_text(cell) for cell in row] for row in self.rows)], self.left)

    def html(self, caption: str) -> str:
        """Return the table as an HTML element with its own scroll bar, and with `caption` for screen readers."""
        caption = html.escape(caption)
        head = "".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in self.headings)
        is_wide = self.is_stacked or len(self.headings) >= _WIDE
        named = [f' data-heading="{html.escape(heading)}"' if is_wide else "" for heading in self.headings]
        body = "".join(
            f'<tr><th scope="row"{named[0]}>{_html(row[0])}</th>'
            f"{''.join(f'<td{name}>{_html(cell)}</td>' for name, cell in zip(named[1:], row[1:], strict=True))}</tr>"
            for row in self.rows
        )
        wide = " lt-wide" if is_wide else ""
        return (
            f'<div class="lt-scroll" tabindex="0" role="region" aria-label="{caption}"><table class="lt-table{wide}">'
            f'<caption class="lt-hidden">{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
            "</table></div>"
        )


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> Iterator[str]:
    """Yield one line of text per row. Columns whose index is in `left` are left-aligned, all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _text(cell: str | Styled) -> str:
    return cell.text if isinstance(cell, Styled) else cell


def _html(cell: str | Styled) -> str:
    text = html.escape(_text(cell))
    return f'<span class="{cell.css_class}">{text}</span>' if isinstance(cell, Styled) and text else text
