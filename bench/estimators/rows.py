"""The measured runs in `bench/data/xmem_rows.json`, with the known circumstances of each run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).parents[1] / "data" / "xmem_rows.json"

TOOLS = ("xMem", "DNNMem", "SchedTune", "LLMem")
"""Estimators whose numbers the rows contain."""

Stratum = Literal["transformer, batch 15 and more", "transformer, smaller batch", "CNN"]
STRATA: tuple[Stratum, ...] = ("transformer, batch 15 and more", "transformer, smaller batch", "CNN")

LENGTH = 128
"""Tokens of the longest line in a batch: lines of WikiText-2 are cut here, and about every fourth is longer."""

ITERATIONS = 4

SHORTER = ((96, LENGTH, LENGTH, LENGTH), (64, 96, 112, LENGTH), (LENGTH, 96, LENGTH, 112))
"""Other possible lengths of the longest line in the four iterations of a run with small batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A tool's estimate of a run; its bytes are None if the tool does not know the model."""

    bytes: int | None
    oom: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """Measured peak of a run whose memory was limited to `limit` bytes."""

    bytes: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training run of four iterations on a GPU."""

    id: str
    source: str
    commit: str
    run_set: str
    family: Literal["cnn", "transformer"]
    model: str
    batch: int
    optimizer: str
    zero_grad_mode: int | None
    gpu: str
    gpu_bytes: int
    oom: bool
    """True if the run ended out of memory."""
    measured_bytes: int
    """Peak of reserved bytes, and of kernels loaded during the run; up to its end if it ended out of memory."""
    estimates: dict[str, Estimate]
    repeats: tuple[int, ...] = ()
    """Measured peaks of repeats of the run with no limit of memory, or one of at least 1.1 times the first peak."""
    limited: tuple[Limited, ...] = ()
    """Measured peaks of repeats with a lower limit of memory that did not end out of memory."""

    @property
    def name(self) -> str:
        """Model, batch size and optimizer, in words."""
        return f"{self.model.rpartition('/')[2]} {self.batch} {self.optimizer}"

    @property
    def stratum(self) -> Stratum:
        """Group of rows whose circumstances are known about equally well.

        In small batches of text the longest line differs from run to run, and with it the reserved bytes.
        """
        if self.family == "cnn":
            return "CNN"
        return "transformer, batch 15 and more" if self.batch >= 15 else "transformer, smaller batch"

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """Tokens of the longest line in each iteration: the expected lengths first, then other possible ones."""
        expected = (LENGTH,) * ITERATIONS
        padded_at_random = self.stratum == "transformer, smaller batch" and self.run_set != "colab"
        return (expected, *SHORTER) if padded_at_random else (expected,)

    @property
    def unknown(self) -> str | None:
        """The reason why this run can't be rebuilt; None if it can."""
        if self.run_set != "colab":
            return None
        missing = []
        if self.model in _ONE_LINE:
            missing.append("one line of text an iteration, of unknown length")
        if self.optimizer == "Adafactor":
            missing.append("torch's Adafactor or transformers', which take different temporaries")
        if self.model.startswith("google/gemma"):
            missing.append("attention kernel not recorded")
        return "; ".join(missing) or None


_ONE_LINE = ("google/gemma-2-2b-it", "meta-llama/Llama-3.2-3B-Instruct")


def load(path: Path = DATA) -> tuple[Row, ...]:
    """Read all rows from the file: finished runs first."""
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return tuple(_row(row) for row in found)


def _row(record: dict[str, Any]) -> Row:
    estimates = {name: Estimate(**estimate) for name, estimate in record["estimates"].items()}
    limited = tuple(Limited(**peak) for peak in record.get("limited", ()))
    return Row(**{**record, "estimates": estimates, "repeats": tuple(record.get("repeats", ())), "limited": limited})
