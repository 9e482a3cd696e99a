"""Estimate a torchrun script on absent GPUs: its first and last process, and the number of GPUs that is enough."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.script_or_profile import write
from lowtide.memory.gpu_specs import GPUS, GpuSpec
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lowtide.script.runner import Script

MOST_GPUS = 64
"""Largest number of GPUs that is tried; numbers double, from 1 on."""


class SeveralGpus:
    """Runs of a script, each in its own process, because a process has only one default process group."""

    def __init__(self, gpu: GpuSpec, script: Script, *, strict: bool, snapshot_to: str | None) -> None:
        self._gpu, self._script = gpu, script
        self._strict, self._snapshot_to = strict, snapshot_to
        self._n_gpus = 0
        """Number that was asked for; other numbers are tried."""

    def estimate(self, n_gpus: int, json_to: str | None, *, fewest: bool) -> int:
        """Print the estimates of the first and of the last process; return the exit code.

        Parameters are sharded by rows, evenly except on the last ranks, whose shards are padded; so ranks in between
        need no more than the first.
        """
        self._n_gpus = n_gpus
        with tempfile.TemporaryDirectory() as folder:
            started = [_Run(self, Path(folder), n_gpus, rank) for rank in sorted({0, n_gpus - 1})]
            runs = [run.ended() for run in started]
            for run in runs:
                if run.code not in (0, 1):
                    click.echo(f"rank {run.rank} of {n_gpus}:\n{run.text}", err=True, nl=False)
                    return run.code
            records = [run.record() for run in runs]
            if json_to != "-":
                click.echo(runs[0].text, nl=False)
                if len(records) > 1:
                    click.echo(_compared(*records))
            if fewest:
                records[0]["fewest"] = found = self._fewest(Path(folder), {n_gpus: records[0]["smallest_gpu"]})
                if json_to != "-":
                    click.echo(_table(found))
        if json_to is not None:
            write(json.dumps(records, indent=1), json_to)
        return max(run.code for run in runs)

    def _fewest(self, folder: Path, smallest: dict[int, str | None]) -> dict[str, int | None]:
        """Return the number of GPUs of each kind that is enough; None if that is more than MOST_GPUS.

        `smallest` gives the smallest sufficient kind by number of GPUs; every larger kind is sufficient, too. Numbers
        for which the script fails are skipped.
        """
        known = [gpu for gpu in GPUS if not gpu.shared and _is_newer(gpu) == _is_newer(self._gpu)]
        order = [gpu.name for gpu in known]
        n = 1
        while n <= MOST_GPUS and order[0] not in smallest.values():
            if n not in smallest:
                run = _Run(self, folder, n, 0, quiet=True).ended()
                if run.code in (0, 1):
                    smallest[n] = run.record()["smallest_gpu"]
            n *= 2
        return {
            gpu.name: min(
                (n for n, name in smallest.items() if name is not None and order.index(name) <= order.index(gpu.name)),
                default=None,
            )
            for gpu in known
        }

    def command(self, n_gpus: int, rank: int, record_to: Path) -> list[str]:
        """Return the command that estimates one process, and writes its record."""
        options = ["--device", f"{n_gpus} x {self._gpu.name}", "--rank", str(rank), "--json", str(record_to)]
        options += ["--strict"] * self._strict
        if self._snapshot_to is not None and (n_gpus, rank) == (self._n_gpus, 0):
            options += ["--snapshot", self._snapshot_to]
        target = ["-m", self._script.target] if self._script.is_module else [self._script.target]
        return [sys.executable, "-m", "lowtide", "estimate", *options, *target, *self._script.args]


class _Run:
    """A running estimate of one process."""

    def __init__(self, several: SeveralGpus, folder: Path, n_gpus: int, rank: int, *, quiet: bool = False) -> None:
        self.rank = rank
        self._record, self._text = (folder / f"{n_gpus}-{rank}.{kind}" for kind in ("json", "txt"))
        with self._text.open("wb") as output:
            command = several.command(n_gpus, rank, self._record)
            self._process = subprocess.Popen(command, stdout=output, stderr=output if rank or quiet else None)

    def ended(self) -> _Run:
        """Wait until the process ends; return this run."""
        self.code = self._process.wait()
        self.text = self._text.read_text(encoding="utf-8", errors="replace")
        return self

    def record(self) -> dict[str, Any]:
        """Return the estimate as plain data."""
        record: dict[str, Any] = json.loads(self._record.read_text(encoding="utf-8"))[0]
        return record


def _is_newer(gpu: GpuSpec) -> bool:
    """Return True for a GPU whose kernels are those of compute capability 8.0 and later."""
    return gpu.capability is None or gpu.capability >= (8, 0)


def _compared(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Describe the last process by its peaks, unless they are the first one's."""
    peaks = {kind: last[f"peak_{kind}_bytes"] for kind in ("requested", "allocated", "reserved")}
    if all(first[f"peak_{kind}_bytes"] == n_bytes for kind, n_bytes in peaks.items()):
        return f"rank {last['rank']}: the same"
    return f"rank {last['rank']}: " + ", ".join(f"{format_bytes(n_bytes)} {kind}" for kind, n_bytes in peaks.items())


def _table(fewest: Mapping[str, int | None]) -> str:
    lines = [f"  {n or f'more than {MOST_GPUS}':>12}  {name}" for name, n in fewest.items()]
    return "\n".join(["enough of each GPU, of 1, 2, 4 and so on:", *lines])
