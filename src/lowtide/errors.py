"""Define the exception tree. Every error says what was asked, what was found and what to do next.

    LowtideError
      BudgetError      ValueError     the budget is not an amount of memory
      Infeasible       ValueError     no plan fits the budget; carries the smallest reachable peak
      OverBudget       RuntimeError   the measured peak stayed above the budget after every repair
      PackageMissing   ImportError    a package needed only for pictures or the demo is absent
      RehearsalError   RuntimeError   the step could not be rehearsed
        DataDependentStepError                 the step depends on tensor values, which need a real run
      ReplayMismatch   RuntimeError   a replayed part of the model did not behave as in forward
      StalePlan        ValueError     the plan was made for another model, batch, device, dtype or torch
      TorchMissing     ImportError    torch is absent or too old

Every error survives pickling, so a worker process can raise it. On the command line each error ends with its
`exit_code`: 2 if Lowtide could not do what was asked, 1 if it could and the answer is "it does not fit".
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lowtide import units


def summarize(error: BaseException) -> str:
    """Return an error's type and its message's first line: "ValueError: no closure"; only the type if it has no
    message.
    """
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class LowtideError(Exception):
    """Base class of every error that Lowtide raises on purpose."""

    exit_code: ClassVar[int] = 2

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling calls cls(*args), which fails if the constructor has required keywords: skip the constructor.
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple)
        _, args, *state = reduced
        return (_restore, (type(self), args), *state)


def _restore(cls: type[LowtideError], args: tuple[object, ...]) -> LowtideError:
    return cls.__new__(cls, *args)


class BudgetError(LowtideError, ValueError):
    """Error for a budget that cannot be read as a positive amount of memory."""


class RehearsalError(LowtideError, RuntimeError):
    """Error for a step that could not be rehearsed, so that its memory is unknown."""


class DataDependentStepError(RehearsalError):
    """Error for a step that depends on tensor values, which are unknown unless the step really runs."""


class ReplayMismatch(LowtideError, RuntimeError):
    """Error for a module of class `module_class` whose replay (its forward, run again in backward) differed from its
    first forward. The step ends without an update.
    """

    def __init__(self, message: str, module_class: type | None = None) -> None:
        super().__init__(message)
        self.module_class = module_class


class PackageMissing(LowtideError, ImportError):
    """Error for an optional package, needed only for pictures or the demo, that is absent or fails to load."""


class TorchMissing(LowtideError, ImportError):
    """Error for a torch that is absent, cannot be loaded or is older than Lowtide needs."""


class StalePlan(LowtideError, ValueError):
    """Error for a plan used with another model, batch, device, dtype or torch than it was made for.

    `differences` lists the mismatches, one line each.
    """

    def __init__(self, message: str, *, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__("\n  ".join((message, *self.differences)))


class Infeasible(LowtideError, ValueError):
    """Error for a budget of `budget_bytes` that no plan fits.

    The smallest peak, `smallest_peak_bytes`, is made of `parts` (name -> bytes). The message offers that peak as a
    budget, with `extra_ratio` (extra time over the plain step's, 0.31 for +31 %) if known, followed by `nearest`: other
    things that would work, worded as advice. `notes` say what was tried in vain, and where plans save nothing.
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

    def with_advice(self, *, nearest: Iterable[str] = (), notes: Iterable[str] = ()) -> "Infeasible":
        """Return this error with `nearest` as the other things that would work, and with `notes` after its own."""
        return Infeasible(
            budget_bytes=self.budget_bytes,
            smallest_peak_bytes=self.smallest_peak_bytes,
            parts=self.parts,
            extra_ratio=self.extra_ratio,
            nearest=nearest,
            notes=(*self.notes, *notes),
        )


class OverBudget(LowtideError, RuntimeError):
    """Error for a step whose measured peak stayed above the budget under its plan, after every repair.

    `notes` name possible causes.
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
    """Return `peak_bytes`, rounded up, as an argument in code: 'budget="7.1GiB"'."""
    return f'budget="{units.format_bytes(peak_bytes, round_up=True).replace(" ", "")}"'


# Users know these classes as lowtide.Infeasible and so on: tracebacks and pickles use that public name.
for _public in (LowtideError, *LowtideError.__subclasses__(), DataDependentStepError):
    _public.__module__ = "lowtide"
