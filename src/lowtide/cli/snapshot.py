"""`lowtide snapshot`: summarize a memory snapshot of PyTorch, without torch and without a browser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.memory.untrusted_files import in_one_line
from lowtide.units import format_bytes, format_count, format_ratio

if TYPE_CHECKING:
    from lowtide.memory.snapshot_summary import Share, Summary


@click.command("snapshot")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--device", type=click.IntRange(0), metavar="N", help="Number of the device.  [default: the only one]")
@click.option(
    "--top",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of lines of code to list.",
)
@click.option(
    "--alloc-conf",
    "settings",
    multiple=True,
    metavar="TEXT",
    help="Also simulate how much the same requests would reserve under these allocator settings, as in "
    '"expandable_segments:True". May be given several times; "" means the defaults.',
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def snapshot(file: Path, device: int | None, top: int, settings: tuple[str, ...], as_json: bool) -> None:
    """Summarize FILE: the peak, what is alive at the peak, and the reserved memory.

    FILE was written by torch.cuda.memory._dump_snapshot or by Lowtide. It may come from an untrusted source, because
    only plain data is unpickled.
    """
    from lowtide.memory.allocator.config import AllocatorConfig
    from lowtide.memory.snapshot_summary import summarize
    from lowtide.memory.snapshots.read import Snapshot

    others = [AllocatorConfig.parse(text) for text in settings]
    summary = summarize(Snapshot.read(file), device, others)
    if as_json:
        click.echo(summary.to_json())
    else:
        click.echo("\n".join(_report(summary, top)))


def _report(summary: Summary, top: int) -> Iterator[str]:
    during = f", in {in_one_line(summary.peak_during)}" if summary.peak_during else ""
    yield f"device {summary.device}: peak {format_bytes(summary.peak_bytes)} requested{during}"
    settings = summary.settings or ("settings default" if summary.settings == "" else "settings unknown")
    yield from _columns(
        f"held from the device, {settings}:",
        [
            ("at the peak", summary.reserved_at_peak_bytes, ""),
            ("at most", summary.peak_reserved_bytes, ""),
            *((f"at most, if {text or 'default'}", n_bytes, "(simulated)") for text, n_bytes in summary.under.items()),
        ],
    )
    if summary.categories:
        yield from _columns("alive at the peak:", _rows(summary.categories))
    yield from _columns("where it was asked for:", _rows(summary.origins[:top], summary.origins[top:]))
    end = summary.at_end
    rows = [
        ("in use", end.requested_bytes, ""),
        ("lost to rounding", end.rounding_bytes, ""),
        ("idle beside blocks in use", end.idle_in_use_bytes, _share(end.idle_in_use_bytes, end.reserved_bytes)),
        ("idle segments", end.idle_segments_bytes, _share(end.idle_segments_bytes, end.reserved_bytes)),
    ]
    title = f"at the end, {format_bytes(end.reserved_bytes)} in {format_count(end.n_segments, 'segment')}:"
    yield from _columns(title, [row for row in rows if row[1]])


def _rows(shares: Iterable[Share], others: tuple[Share, ...] = ()) -> list[tuple[str, int, str]]:
    rows = [(in_one_line(share.name), share.bytes, format_count(share.n_blocks, "block")) for share in shares]
    if others:
        n_blocks = sum(share.n_blocks for share in others)
        n_bytes = sum(share.bytes for share in others)
        rows.append((format_count(len(others), "other"), n_bytes, format_count(n_blocks, "block")))
    return rows


def _share(n_bytes: int, whole: int) -> str:
    return format_ratio(n_bytes / whole) if whole else ""


def _columns(title: str, rows: list[tuple[str, int, str]]) -> Iterator[str]:
    if rows:
        yield title
        width = max(len(name) for name, _, _ in rows)
        for name, n_bytes, rest in rows:
            yield f"  {name:<{width}}  {format_bytes(n_bytes):>8}  {rest}".rstrip()
