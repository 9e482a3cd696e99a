"""Runs that reports are made of in tests: a small plan with its proof, its findings, and needs on a GPU."""

from dataclasses import replace

from lowtide.planner import plan
from lowtide.planner.budget_frontier import frontier
from lowtide.planner.records import Plan, Profile
from lowtide.report.finding import Finding
from lowtide.report.run_record import GpuNeeds, Proof, RunRecord, build_record
from planner.profiles import transformer

PROFILE: Profile = transformer(3, width=64 * 2**10)
PLAN: Plan = plan(PROFILE, "65%")
FRONTIER = frontier(PROFILE, n_budgets=3)
FINDINGS = (
    Finding(
        code="LT003",
        name="graph retained",
        held_bytes=123_456_789,
        since_step=2,
        holder="variable <loss> of train()",
        made_at="train.py:30",
        fix="drop it: del loss",
    ),
)
NEED = GpuNeeds(
    batch=8,
    gpu="A100",
    gpu_bytes=40 * 2**30,
    verdict="fits",
    is_sure=True,
    peak_requested_bytes=2**30,
    peak_allocated_bytes=2**30,
    peak_reserved_bytes=2**31,
    least_reserved_bytes=2**30,
    most_reserved_bytes=2**31,
    left_bytes=30 * 2**30,
    smallest_gpu="T4",
    allocator="native",
)


def run(share: str | None = None) -> RunRecord:
    """Return a run under a plan for 65 % of the plain peak, or another share."""
    made = PLAN if share is None else plan(PROFILE, share)
    proof = Proof(
        measured_peak_bytes=made.predicted.peak_bytes - 5,
        is_within_budget=True,
        text="bit-identical to the plain step: loss and gradients",
        is_proven=True,
        planned_ms=110.0,
        plain_ms=100.0,
    )
    found = build_record("lowtide run --budget 65% train.py", profile=PROFILE, plan=made, proof=proof)
    return replace(found, frontier=FRONTIER)
