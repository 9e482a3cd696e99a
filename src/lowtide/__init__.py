"""Lowtide fits a PyTorch training step into a memory budget with little extra time, and verifies the result.

Public names are imported on first use (PEP 562), so `import lowtide` loads neither torch nor anything else slow.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lowtide.utils.rendering import register_renderers

if TYPE_CHECKING:
    __version__: str
    from lowtide.api.apply import Applied, apply
    from lowtide.api.fit import fit
    from lowtide.api.fit_result import Fitted, FittedSizes
    from lowtide.api.fitted import fitted, remove
    from lowtide.api.rehearse import rehearse
    from lowtide.api.release import loss_only, release, step
    from lowtide.api.timeline import timeline
    from lowtide.api.verify import Verdict, verify
    from lowtide.diagnostics.graph import graph
    from lowtide.diagnostics.leaks.watcher import Watch, watch
    from lowtide.diagnostics.oom.explain_oom import explain_oom
    from lowtide.errors import (
        BudgetError,
        DataDependentStepError,
        Infeasible,
        LowtideError,
        OverBudget,
        PackageMissing,
        RehearsalError,
        ReplayMismatch,
        StalePlan,
        TorchMissing,
    )
    from lowtide.estimator.absent_processes import absent_processes
    from lowtide.estimator.batch_search import LargestBatch, largest_batch
    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate
    from lowtide.estimator.estimation import estimate
    from lowtide.estimator.memory_estimate import MemoryEstimate
    from lowtide.levers.accumulation.accumulate import accumulate
    from lowtide.levers.accumulation.split_batch import micro_batches
    from lowtide.memory.measure import measure
    from lowtide.planner import plan
    from lowtide.planner.budget_frontier import Frontier, frontier
    from lowtide.planner.records import Plan, Profile
    from lowtide.report.run_record import RunRecord
    from lowtide.script.within import Run, RunVerdict, within

__all__ = [
    "Applied",
    "BudgetError",
    "DataDependentStepError",
    "Fitted",
    "FittedSizes",
    "Frontier",
    "GpuMemoryEstimate",
    "Infeasible",
    "LargestBatch",
    "LowtideError",
    "MemoryEstimate",
    "OverBudget",
    "PackageMissing",
    "Plan",
    "Profile",
    "RehearsalError",
    "ReplayMismatch",
    "Run",
    "RunRecord",
    "RunVerdict",
    "StalePlan",
    "TorchMissing",
    "Verdict",
    "Watch",
    "__version__",
    "absent_processes",
    "accumulate",
    "apply",
    "estimate",
    "explain_oom",
    "fit",
    "fitted",
    "frontier",
    "graph",
    "largest_batch",
    "loss_only",
    "measure",
    "micro_batches",
    "plan",
    "rehearse",
    "release",
    "remove",
    "step",
    "timeline",
    "verify",
    "watch",
    "within",
]

# The module of each public name. tests/test_package.py checks that this table, __all__ and the imports above agree.
_HOMES = {
    "Applied": "lowtide.api.apply",
    "BudgetError": "lowtide.errors",
    "GpuMemoryEstimate": "lowtide.estimator.cuda.gpu_estimate",
    "Fitted": "lowtide.api.fit_result",
    "FittedSizes": "lowtide.api.fit_result",
    "MemoryEstimate": "lowtide.estimator.memory_estimate",
    "Frontier": "lowtide.planner.budget_frontier",
    "Infeasible": "lowtide.errors",
    "LargestBatch": "lowtide.estimator.batch_search",
    "LowtideError": "lowtide.errors",
    "OverBudget": "lowtide.errors",
    "PackageMissing": "lowtide.errors",
    "Plan": "lowtide.planner.records",
    "Profile": "lowtide.planner.records",
    "RehearsalError": "lowtide.errors",
    "ReplayMismatch": "lowtide.errors",
    "Run": "lowtide.script.within",
    "RunRecord": "lowtide.report.run_record",
    "RunVerdict": "lowtide.script.within",
    "StalePlan": "lowtide.errors",
    "TorchMissing": "lowtide.errors",
    "DataDependentStepError": "lowtide.errors",
    "Verdict": "lowtide.api.verify",
    "Watch": "lowtide.diagnostics.leaks.watcher",
    "absent_processes": "lowtide.estimator.absent_processes",
    "accumulate": "lowtide.levers.accumulation.accumulate",
    "apply": "lowtide.api.apply",
    "explain_oom": "lowtide.diagnostics.oom.explain_oom",
    "fit": "lowtide.api.fit",
    "fitted": "lowtide.api.fitted",
    "estimate": "lowtide.estimator.estimation",
    "frontier": "lowtide.planner.budget_frontier",
    "graph": "lowtide.diagnostics.graph",
    "largest_batch": "lowtide.estimator.batch_search",
    "loss_only": "lowtide.api.release",
    "measure": "lowtide.memory.measure",
    "micro_batches": "lowtide.levers.accumulation.split_batch",
    "plan": "lowtide.planner",
    "rehearse": "lowtide.api.rehearse",
    "release": "lowtide.api.release",
    "remove": "lowtide.api.fitted",
    "step": "lowtide.api.release",
    "timeline": "lowtide.api.timeline",
    "verify": "lowtide.api.verify",
    "watch": "lowtide.diagnostics.leaks.watcher",
    "within": "lowtide.script.within",
}

register_renderers(
    {
        "Frontier": "lowtide.report.frontier_table",
        "Plan": "lowtide.report.plan_text",
        "Profile": "lowtide.report.profile_text",
        "RunRecord": "lowtide.report.run_text",
    },
    html="lowtide.report.fragments",
)

# Errors and planning work on machines without torch; every other name checks for it first.
_TORCH_FREE = ("lowtide.errors", "lowtide.planner", "lowtide.report")


if not TYPE_CHECKING:  # hidden from type checkers, which would accept any name otherwise

    def __getattr__(name: str) -> object:
        if name == "__version__":
            globals()[name] = version = import_module("lowtide.utils.installed_versions").find_own_version()
            return version
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
        if not home.startswith(_TORCH_FREE):
            from lowtide.utils.optional_deps import require_torch

            require_torch(f"lowtide.{name}")
        from lowtide.utils.interrupts import uninterrupted

        # Ctrl-C waits: after an interrupted import Python would run the modules again, and register recipes twice
        value = getattr(uninterrupted(import_module)(home), name)
        globals()[name] = value  # makes later reads of the name bypass this function
        return value


def load_ipython_extension(shell: object) -> None:
    """Add the cell magic `%%lowtide` to IPython; `%load_ext lowtide` calls this function."""
    from lowtide.utils.optional_deps import require_torch

    require_torch("%load_ext lowtide")
    import_module("lowtide.integrations.notebook").register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
