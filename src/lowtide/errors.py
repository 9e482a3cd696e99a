"""The exception tree. Every error says what was asked, what was found and what to do next.

    LowtideError
      BudgetError      ValueError     a budget that is not an amount of memory
      Infeasible       ValueError     no plan fits the budget; carries the smallest peak that one can reach
      OverBudget       RuntimeError   a measured peak stayed above the budget after every repair
      PackageMissing   ImportError    a package that only pictures or the demo need is absent
      RehearsalError   RuntimeError   the step could not be rehearsed
        DataDependentStepError                 the step decides by what is in a tensor, and it was to run without memory
      ReplayMismatch   RuntimeError   a part of the model, run again, was another one than before
      StalePlan        ValueError     a plan was made for another model, batch, device, dtype or torch
      TorchMissing     ImportError    torch is absent or too old

All survive pickling, so a worker process can raise them. On the command line each ends with its `exit_code`: 2 where
Lowtide could not do what was asked, 1 where it could and the answer is "it does not fit".
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lowtide import units


class LowtideError(Exception):
    """Whatever Lowtide raises on purpose."""

    exit_code: ClassVar[int] = 2

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is unpickled as cls(*args), which fails where the constructor has required keywords: skip it.
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple)
        _, args, *state = reduced
        return (_restore, (type(self), args), *state)


def _restore(cls: type[LowtideError], args: tuple[object, ...]) -> LowtideError:
    return cls.__new__(cls, *args)


class BudgetError(LowtideError, ValueError):
    """A budget that cannot be read as a positive amount of memory."""


class RehearsalError(LowtideError, RuntimeError):
    """The step could not be rehearsed, so nothing is known about its memory."""


class DataDependentStepError(RehearsalError):
    """The step decides something by what is in a tensor, and that can't be known without running it."""


class ReplayMismatch(LowtideError, RuntimeError):
    """A module of `module_class` did something else when it was run again: the step ends, and nothing is updated."""

    def __init__(self, message: str, module_class: type | None = None) -> None:
        super().__init__(message)
        self.module_class = module_class


class PackageMissing(LowtideError, ImportError):
    """A package that only some of Lowtide needs, for pictures or for the demo, is absent or cannot be loaded."""


class TorchMissing(LowtideError, ImportError):
    """Torch is absent, cannot be loaded or is older than Lowtide needs."""


class StalePlan(LowtideError, ValueError):
    """A plan was made for something else than what it is used on; `differences` says where, one line each."""

    def __init__(self, message: str, *, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n  ".join((message, *self.differences)))


class Infeasible(LowtideError, ValueError):
    """No plan fits `budget_bytes`; the most saving one peaks at `smallest_peak_bytes`, made of `parts` (name -> bytes).

    The message offers the smallest peak as a budget, with its `extra_ratio` (extra time over the plain step's, 0.31 for
    +31 %) if that is known, and then `nearest`: other things that would work, worded as advice. `notes` say what was
    tried in vain, and where plans save nothing.
    """

    exit_code = 1

    def __init__(
        self,
        *,
        budget_bytes: int,
        smallest_peak_bytes: int,
        parts: Mapping[str, int],
        extra_ratio: float | None = None,
        nearest: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.smallest_peak_bytes = smallest_peak_bytes
        self.parts = dict(parts)
        self.extra_ratio = extra_ratio
        self.notes = tuple(notes)
        budget, smallest = units.format_apart(budget_bytes, smallest_peak_bytes, round_up=True)
        extra = "" if extra_ratio is None else f" ({units.format_ratio(extra_ratio, signed=True)} time)"
        super().__init__(
            f"no plan fits {budget}.\n"
            f"  Smallest peak: {smallest}{units.format_parts(smallest_peak_bytes, self.parts)}.\n"
            f"  Nearest: {', or '.join((_as_budget(smallest_peak_bytes) + extra, *nearest))}."
            + "".join(f"\n  Note: {note}." for note in self.notes)
        )


class OverBudget(LowtideError, RuntimeError):
    """The step ran under its plan and its measured peak stayed above the budget, whatever was repaired.

    `notes` say what may be behind it.
    """

    exit_code = 1

    def __init__(
        self,
        *,
        budget_bytes: int,
        measured_peak_bytes: int,
        nearest: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> None:
        self.budget_bytes = budget_bytes
        self.measured_peak_bytes = measured_peak_bytes
        budget, measured = units.format_apart(budget_bytes, measured_peak_bytes)
        super().__init__(
            f"the measured peak stayed above the budget of {budget}.\n"
            f"  Measured: {measured}, {units.format_bytes(measured_peak_bytes - budget_bytes)} too much.\n"
            f"  Nearest: {', or '.join((_as_budget(measured_peak_bytes), *nearest))}."
            + "".join(f"\n  Note: {note}." for note in notes)
        )


def _as_budget(peak_bytes: int) -> str:
    """The shortest budget that `peak_bytes` fits, as an argument to type."""
    return f'budget="{units.format_bytes(peak_bytes, round_up=True).replace(" ", "")}"'


# Users meet these as lowtide.Infeasible and so on: say so in tracebacks, and pickle them under the name that is kept.
for _public in (LowtideError, *LowtideError.__subclasses__(), DataDependentStepError):
    _public.__module__ = "lowtide"
