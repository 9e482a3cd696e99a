"""Read a memory snapshot of PyTorch: its devices, its settings and the history of each device.

Field names were read in torch/csrc/cuda/Module.cpp of torch 2.13; files of torch 2.1 and later have them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.memory.allocator.config import VARIABLES, AllocatorConfig
from lowtide.memory.snapshots.entry_checks import check
from lowtide.memory.snapshots.history import WRITTEN_BY, History, rebuild
from lowtide.memory.snapshots.plain_pickle import load_plain
from lowtide.memory.untrusted_files import in_one_line


class Snapshot:
    """Data that `torch.cuda.memory._snapshot()` returns. Raises LowtideError for anything else."""

    def __init__(self, record: object, n_bytes: int | None = None) -> None:
        """Check `record`; `n_bytes` is the size of the file that it comes from."""
        if isinstance(record, list):  # format of torch 1: segments alone
            record = {"segments": record}
        if not isinstance(record, dict) or not isinstance(record.get("segments"), list):
            raise LowtideError("this is not a memory snapshot: a dict with a list of segments was expected.")
        check(record, n_bytes)
        self.record: dict[str, Any] = record

    @classmethod
    def read(cls, path: str | Path) -> Snapshot:
        """Return the snapshot in a file, which may be untrusted: only plain data is read. Raises LowtideError for any
        other file.
        """
        record = load_plain(path)
        return cls(record, Path(path).stat().st_size)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices that have memory or a history."""
        traces = self.record.get("device_traces", [])
        with_segments = {segment.get("device", 0) for segment in self.record["segments"]}
        return tuple(sorted(with_segments | {number for number, trace in enumerate(traces) if trace}))

    @property
    def settings(self) -> AllocatorConfig | None:
        """Settings of the allocator; None if the file lacks them. Raises LowtideError for unknown settings."""
        settings = self.record.get("allocator_settings") or {}
        text = next((settings[name] for name in VARIABLES if name in settings), None)
        try:
            return None if text is None else AllocatorConfig.parse(text)
        except LowtideError as error:
            raise LowtideError(f"this snapshot has settings that are not known: {in_one_line(str(error))}") from error

    def segments(self, device: int) -> list[Mapping[str, Any]]:
        """Return the segments of a device at the time of the snapshot."""
        return [segment for segment in self.record["segments"] if segment.get("device", 0) == device]

    def history(self, device: int | None = None) -> History:
        """Return the history of a device, by default the only one. Raises LowtideError if there is none."""
        device = self._device(device)
        traces = self.record.get("device_traces", [])
        try:
            return rebuild(
                device,
                self.segments(device),
                traces[device] if device < len(traces) else (),
                self.record.get("external_annotations") or (),
                is_ours=WRITTEN_BY in self.record,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise LowtideError(f"this snapshot has entries of an unknown form: {in_one_line(repr(error))}.") from error

    def _device(self, device: int | None) -> int:
        if device is None and len(self.devices) == 1:
            return self.devices[0]
        if device is None or device not in self.devices:
            known = ", ".join(map(str, self.devices)) or "none"
            wanted = "it does not say of which device" if device is None else f"device {device} was asked for"
            raise LowtideError(f"no history could be taken from this snapshot: {wanted}. It knows devices: {known}.")
        return device
