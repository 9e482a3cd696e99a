"""Estimate a torchrun script on absent GPUs: its first and last process, and the number of GPUs that is enough."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.script_or_profile import write
from lowtide.memory.gpu_specs import GPUS, GpuSpec
from lowtide.units import compare_with_budget, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lowtide.script.runner import Script

MOST_GPUS = 64
"""Largest number of GPUs that is tried; tried numbers double, from 1 on."""


HEADINGS = {
    "plain": "enough GPUs of each kind, by the number of GPUs that was tried",
    "recomputed": "the same with all but matrix products, convolutions and attention recomputed, as a plan may",
    "replayed": "the same with every block replayed as well, about the least memory of a plan",
}
"""Heading of the table for each way to run a step."""


class SeveralGpus:
    """Estimates of a torchrun script's processes, each made in a process of its own.

    A process has only one default process group, so it can stand for one rank only.
    """

    def __init__(
        self, gpu: GpuSpec, script: Script, how: str, plan_file: str | None, *, strict: bool, snapshot_to: str | None
    ) -> None:
        self._gpu, self._script, self._how, self._plan_file = gpu, script, how, plan_file
        self._strict, self._snapshot_to = strict, snapshot_to
        self._n_gpus = 0
        """Number of GPUs that was requested; other numbers are tried, too."""
        self._is_last = False
        """True if the last process needs more memory than the first, for example because of a larger batch."""

    def estimate(self, n_gpus: int, json_to: str | None, *, fewest: bool) -> int:
        """Print the estimates of the first and of the last process; return the exit code.

        Parameters are sharded by rows, evenly except on the last ranks, whose shards are padded. So the ranks between
        the first and the last need no more memory than the first.
        """
        self._n_gpus = n_gpus
        with tempfile.TemporaryDirectory() as folder:
            ranks = sorted({0, n_gpus - 1})
            started = [_Run(self, Path(folder), self._gpu, n_gpus, rank, self._how) for rank in ranks]
            runs = [run.ended() for run in started]
            for run in runs:
                if run.code not in (0, 1):
                    if run.text:  # the first process writes its errors to stderr itself
                        click.echo(f"rank {run.rank} of {n_gpus}:\n{run.text}", err=True, nl=False)
                    return run.code
            records = [run.record() for run in runs]
            if json_to != "-":
                click.echo(runs[0].text, nl=False)
                if len(records) > 1:
                    click.echo(compared(*records))
            if fewest:
                larger = max(records, key=lambda record: record["peak_reserved_bytes"])
                self._is_last = larger["rank"] > 0
                tried = [(gpu, how) for how in HEADINGS for gpu in (self._gpu, find_other_generation(self._gpu))]
                with ThreadPoolExecutor(len(HEADINGS)) as pool:
                    found = pool.map(lambda way: self._estimate_by_number(Path(folder), n_gpus, larger, *way), tried)
                    rows = dict(zip(tried, found, strict=True))
                by_way = {how: [row for way in tried if way[1] == how for row in rows[way]] for how in HEADINGS}
                records[0]["by_number"] = by_way
                if json_to != "-":
                    click.echo("\n".join(table(by_way[how], self._gpu, how) for how in HEADINGS))
        if json_to is not None:
            write(json.dumps(records, indent=1), json_to)
        return max(run.code for run in runs)

    def _estimate_by_number(
        self, folder: Path, n_gpus: int, requested: Mapping[str, Any], gpu: GpuSpec, how: str
    ) -> list[dict[str, Any]]:
        """Estimate the memory of one process for several numbers of GPUs; return a row for each number, the smallest
        first.

        The process is the first one, or the last one if that needs more. The kernels are those of `gpu`. Numbers go
        down until no GPU with such kernels is large enough, and up until the smallest such GPU is large enough, or to
        MOST_GPUS. Numbers for which the script fails are left out; if it fails for `n_gpus`, the list is empty.
        `requested` is the record of the plain step on `n_gpus` of the GPU that the command line names.
        """
        names = [other.name for other in _list_same_generation(gpu)]
        powers = [2**power for power in range(MOST_GPUS.bit_length())]
        record: Mapping[str, Any] | None = requested
        if (gpu, how) != (self._gpu, "plain"):
            record = self._record(folder, gpu, n_gpus, how)
        if record is None:
            return []
        rows = {n_gpus: _row(n_gpus, record)}
        rows[n_gpus]["extra_flops"] = rows[n_gpus]["flops"] / max(1, requested["flops"]) - 1
        for numbers, enough in (
            (sorted((n for n in powers if n < n_gpus), reverse=True), lambda row: row["smallest_gpu"] is None),
            ([n for n in powers if n > n_gpus], lambda row: row["smallest_gpu"] == names[0]),
        ):
            last = rows[n_gpus]
            for n in numbers:
                if enough(last):
                    break
                if (record := self._record(folder, gpu, n, how)) is not None:
                    last = rows[n] = _row(n, record)
        return with_gpus([rows[n] for n in sorted(rows)], names)

    def _record(self, folder: Path, gpu: GpuSpec, n_gpus: int, how: str) -> dict[str, Any] | None:
        """Estimate the one of `n_gpus` processes that needs the most memory; return its record, or None if the script
        fails.
        """
        rank = n_gpus - 1 if self._is_last else 0
        run = _Run(self, folder, gpu, n_gpus, rank, how, quiet=True).ended()
        return run.record() if run.code in (0, 1) else None

    def command(self, gpu: GpuSpec, n_gpus: int, rank: int, how: str, record_to: Path) -> list[str]:
        """Return the command line that estimates process `rank` and writes its record to a file."""
        options = ["--device", f"{n_gpus} x {gpu.name}", "--rank", str(rank), "--how", how]
        options += ["--record", str(record_to)]
        options += ["--strict"] * self._strict
        if self._plan_file is not None:
            options += ["--plan", self._plan_file]
        is_asked_for = (gpu, n_gpus, rank, how) == (self._gpu, self._n_gpus, 0, self._how)
        if self._snapshot_to is not None and is_asked_for:
            options += ["--snapshot", self._snapshot_to]
        target = ["-m", self._script.target] if self._script.is_module else [self._script.target]
        return [sys.executable, "-m", "lowtide", "estimate", *options, *target, *self._script.args]


class _Run:
    """An estimate of one rank, which runs in a process of its own."""

    def __init__(
        self, several: SeveralGpus, folder: Path, gpu: GpuSpec, n_gpus: int, rank: int, how: str, *, quiet: bool = False
    ) -> None:
        self.rank = rank
        name = f"{gpu.name}-{n_gpus}-{rank}-{how}"
        self._record, self._text = (folder / f"{name}.{kind}" for kind in ("json", "txt"))
        with self._text.open("wb") as output:
            command = several.command(gpu, n_gpus, rank, how, self._record)
            self._process = subprocess.Popen(command, stdout=output, stderr=output if rank or quiet else None)

    def ended(self) -> _Run:
        """Wait until the process ends; return this run."""
        self.code = self._process.wait()
        self.text = self._text.read_text(encoding="utf-8", errors="replace")
        return self

    def record(self) -> dict[str, Any]:
        """Return the estimate of the ended process as plain data."""
        record: dict[str, Any] = json.loads(self._record.read_text(encoding="utf-8"))[0]
        return record


def _is_newer(gpu: GpuSpec) -> bool:
    """Return True if `gpu` runs the kernels of compute capability 8.0 and later."""
    return gpu.capability is None or gpu.capability >= (8, 0)


def _list_same_generation(gpu: GpuSpec) -> list[GpuSpec]:
    """Return the listed GPUs of the same kernel generation as `gpu`, the smallest first."""
    return [other for other in GPUS if not other.shared and _is_newer(other) == _is_newer(gpu)]


def find_other_generation(gpu: GpuSpec) -> GpuSpec:
    """Return the largest listed GPU of the other kernel generation: compute capability 8.0 and later, or earlier than
    8.0.

    On a GPU of another generation than `gpu` the same step needs a different amount of memory.
    """
    return max((other for other in GPUS if _is_newer(other) != _is_newer(gpu)), key=lambda other: other.total_bytes)


def compared(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Describe the peaks of the last process, or say that they equal those of the first process.

    If the first and the last process have different answers, the last one's answer is added.
    """
    peaks = {kind: last[f"peak_{kind}_bytes"] for kind in ("requested", "allocated", "reserved")}
    if all(first[f"peak_{kind}_bytes"] == n_bytes for kind, n_bytes in peaks.items()):
        return f"rank {last['rank']}: the same"
    text = f"rank {last['rank']}: " + ", ".join(f"{format_bytes(n_bytes)} {kind}" for kind, n_bytes in peaks.items())
    if "plan" in last:
        text += f"; under the plan: {compare_with_budget(last['plan']['peak_bytes'], last['plan']['budget_bytes'])}"
    if last["verdict"] != first["verdict"]:
        text += f"; answer: {last['verdict']}"
    if last["smallest_gpu"] != first["smallest_gpu"]:
        text += f"; smallest GPU: {last['smallest_gpu'] or 'none that is known'}"
    return text


def _row(n_gpus: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table row: the memory that one of `n_gpus` processes needs, its FLOPs, and the smallest GPU with enough
    memory.
    """
    columns = ("gpu", "peak_requested_bytes", "peak_reserved_bytes", "smallest_gpu", "flops")
    return {"n_gpus": n_gpus, **{name: record[name] for name in columns}}


def with_gpus(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Add to each row the names of GPUs for which the row's number of GPUs is the smallest sufficient one.

    `rows` begins with the smallest number, `names` with the smallest GPU. If a GPU suffices, each larger GPU does, too.
    """
    completed, remaining = [], list(names)
    for row in rows:
        n_small = remaining.index(row["smallest_gpu"]) if row["smallest_gpu"] in remaining else len(remaining)
        completed.append({**row, "enough_of": remaining[n_small:]})
        del remaining[n_small:]
    return completed


def table(rows: Sequence[Mapping[str, Any]], gpu: GpuSpec, how: str = "plain") -> str:
    """Format a line for each number of GPUs: reserved memory, and the GPUs for which this number is the smallest
    sufficient one.

    A number that is the smallest for no GPU is shown only if it was estimated on `gpu`, the GPU that the command line
    names.
    """
    extra = next((f", {row['extra_flops']:+.0%} FLOPs" for row in rows if row.get("extra_flops")), "")
    lines = [f"{HEADINGS[how]}{extra}:"]
    for row in sorted(rows, key=lambda row: row["n_gpus"]):
        if row["enough_of"] or row["gpu"] == gpu.name:
            reserved = f"{row['n_gpus']:>4}  {format_bytes(row['peak_reserved_bytes']):>9} reserved on each"
            lines.append(f"{reserved}: {', '.join(row['enough_of']) or '-'}")
    for like in (gpu, find_other_generation(gpu)):
        alike = [row for row in rows if row["gpu"] == like.name]
        enough = {name for row in alike for name in row["enough_of"]}
        missing = ", ".join(other.name for other in _list_same_generation(like) if other.name not in enough)
        if not alike:
            lines.append(f"  no answer for {missing}: `lowtide estimate --how {how} --rank 0` says why, on {like.name}")
        elif missing:
            lines.append(f"  {alike[-1]['n_gpus']} may not be enough of: {missing}")
    return "\n".join(lines)
