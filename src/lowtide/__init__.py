"""Lowtide makes a PyTorch training step fit in a memory budget given in bytes, at the least extra time, and proves it.

Public names are imported on first use (PEP 562), so `import lowtide` loads neither torch nor anything else slow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.accumulation.batches import micro_batches
    from lowtide.accumulation.whole import accumulate
    from lowtide.applying import Applied, apply
    from lowtide.errors import (
        BudgetError,
        Infeasible,
        LowtideError,
        OverBudget,
        PackageMissing,
        RehearsalError,
        ReplayMismatch,
        StalePlan,
        TorchMissing,
        Unforeseeable,
    )
    from lowtide.fitting import Fitted, FittedSizes, fit
    from lowtide.foresight import Foresight, Largest, foresee, largest
    from lowtide.foresight.device.outcome import CardForesight
    from lowtide.graphs import graph
    from lowtide.memory.measuring import measure
    from lowtide.oom.noting import explain_oom
    from lowtide.planner import plan
    from lowtide.planner.frontier import Frontier, frontier
    from lowtide.planner.records import Plan, Profile
    from lowtide.rehearsing import rehearse
    from lowtide.releasing import loss_only, release, step
    from lowtide.timelines import timeline
    from lowtide.verification import Verdict, verify
    from lowtide.watching.watch import Watch, watch

__version__ = "0.1.0"

__all__ = [
    "Applied",
    "BudgetError",
    "CardForesight",
    "Fitted",
    "FittedSizes",
    "Foresight",
    "Frontier",
    "Infeasible",
    "Largest",
    "LowtideError",
    "OverBudget",
    "PackageMissing",
    "Plan",
    "Profile",
    "RehearsalError",
    "ReplayMismatch",
    "StalePlan",
    "TorchMissing",
    "Unforeseeable",
    "Verdict",
    "Watch",
    "__version__",
    "accumulate",
    "apply",
    "explain_oom",
    "fit",
    "foresee",
    "frontier",
    "graph",
    "largest",
    "loss_only",
    "measure",
    "micro_batches",
    "plan",
    "rehearse",
    "release",
    "step",
    "timeline",
    "verify",
    "watch",
]

# Where each public name lives. tests/test_package.py holds this, __all__ and the imports above to the same set.
_HOMES = {
    "Applied": "lowtide.applying",
    "BudgetError": "lowtide.errors",
    "CardForesight": "lowtide.foresight.device.outcome",
    "Fitted": "lowtide.fitting",
    "FittedSizes": "lowtide.fitting",
    "Foresight": "lowtide.foresight",
    "Frontier": "lowtide.planner.frontier",
    "Infeasible": "lowtide.errors",
    "Largest": "lowtide.foresight",
    "LowtideError": "lowtide.errors",
    "OverBudget": "lowtide.errors",
    "PackageMissing": "lowtide.errors",
    "Plan": "lowtide.planner.records",
    "Profile": "lowtide.planner.records",
    "RehearsalError": "lowtide.errors",
    "ReplayMismatch": "lowtide.errors",
    "StalePlan": "lowtide.errors",
    "TorchMissing": "lowtide.errors",
    "Unforeseeable": "lowtide.errors",
    "Verdict": "lowtide.verification",
    "Watch": "lowtide.watching.watch",
    "accumulate": "lowtide.accumulation.whole",
    "apply": "lowtide.applying",
    "explain_oom": "lowtide.oom.noting",
    "fit": "lowtide.fitting",
    "foresee": "lowtide.foresight",
    "frontier": "lowtide.planner.frontier",
    "graph": "lowtide.graphs",
    "largest": "lowtide.foresight",
    "loss_only": "lowtide.releasing",
    "measure": "lowtide.memory.measuring",
    "micro_batches": "lowtide.accumulation.batches",
    "plan": "lowtide.planner",
    "rehearse": "lowtide.rehearsing",
    "release": "lowtide.releasing",
    "step": "lowtide.releasing",
    "timeline": "lowtide.timelines",
    "verify": "lowtide.verification",
    "watch": "lowtide.watching.watch",
}

# Errors and planning work on machines without torch; every other name checks for it first.
_TORCH_FREE = ("lowtide.errors", "lowtide.planner")


if not TYPE_CHECKING:  # a type checker that saw this would take any name for a public one

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
        if not home.startswith(_TORCH_FREE):
            from lowtide._require import require_torch

            require_torch(f"lowtide.{name}")
        value = getattr(import_module(home), name)
        globals()[name] = value  # so that this runs once a name
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
