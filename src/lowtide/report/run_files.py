"""Read the files of all commands that run a step as RunRecords, for `lowtide report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from lowtide.errors import LowtideError
from lowtide.memory.untrusted_files import check_numbers, in_one_line, unpacked
from lowtide.planner.budget_frontier import Frontier
from lowtide.planner.records import Plan, Profile
from lowtide.planner.serialization import kind_of
from lowtide.report.finding import Finding
from lowtide.report.run_record import GpuNeeds, RunRecord, build_record, versions
from lowtide.report.step_memory import StepMemory


def read_run(path: Path, others: Mapping[str, Callable[[Path, str], RunRecord]] | None = None) -> RunRecord:
    """Read a run from a file: a RunRecord, or another record that a command's `--json` wrote.

    Args:
        path: The file.
        others: Functions that read further kinds of records, by kind. They are called with the file and the command to
            record.

    Raises:
        LowtideError: For any other file.
    """
    try:
        text = unpacked(path)
    except (OSError, ValueError) as error:
        raise LowtideError(f"{path} can't be read: {in_one_line(str(error))}.") from error
    command = f"lowtide report {path}"
    kind = kind_of(text)
    if kind == "RunRecord":
        return RunRecord.from_json(path)
    if kind == "Profile":
        return build_record(command, profile=Profile.from_json(path))
    if kind == "Plan":
        return build_record(command, plan=Plan.from_json(path))
    if kind == "Frontier":
        curve = Frontier.from_json(path)
        made_for = curve.fingerprint
        return RunRecord(command=command, versions=versions(made_for), fingerprint=made_for, frontier=curve)
    if others is not None and kind is not None and kind in others:
        return others[kind](path, command)
    try:
        return _read_other_run(text, command)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise LowtideError(
            f"{path} is not a record of a run: write one with `lowtide run --report FILE.json`, or give the file of "
            "`lowtide rehearse --json`, `estimate --json` or `watch --json`."
        ) from error


def _read_other_run(text: bytes, command: str) -> RunRecord:
    """Read the run in the JSON of `lowtide watch` or `lowtide estimate`. Raises ValueError for other text."""
    written = msgspec.json.decode(text, type=_Watched | list[msgspec.Raw])
    if isinstance(written, _Watched):
        check_numbers(written.findings)
        return RunRecord(command=command, versions=versions(), findings=written.findings, n_steps=written.steps)
    if not written:
        raise ValueError("it has no estimate")
    last = msgspec.json.decode(written[-1], type=_Estimated)
    needs = tuple(msgspec.json.decode(each, type=GpuNeeds) for each in written if last.gpu is not None)
    check_numbers([*needs, last.at_peak_bytes, last.budget_bytes])
    return RunRecord(
        command=command,
        versions=versions(),
        subject="An estimated step",
        before=last.memory(),
        plain_budget_bytes=last.budget_bytes,
        needs=needs,
        assumed=last.assumed,
        unknown=last.unknown,
    )


class _Watched(msgspec.Struct):
    """The file of `lowtide watch --json`."""

    steps: int
    findings: tuple[Finding, ...]


class _Estimated(msgspec.Struct):
    """The estimate for one batch size in the file of `lowtide estimate --json`."""

    at_peak_bytes: dict[str, int]
    unknown: tuple[str, ...]
    assumed: tuple[str, ...]
    gpu: str | None = None
    budget_bytes: int | None = None

    def memory(self) -> StepMemory:
        """Return the memory at the peak as a StepMemory with a single moment."""
        parts = self.at_peak_bytes
        memory = StepMemory(
            how="estimated",
            n_events=1,
            at=(0,),
            bytes={name: (n,) for name, n in parts.items() if n > 0},
            floor_bytes=sum(n for n in parts.values() if n < 0),
        )
        memory.check()
        return memory
