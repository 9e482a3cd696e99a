"""`lowtide run`: run an unchanged training script within a memory budget, or under a plan."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.report_option import format_command_line, report_option, write_report
from lowtide.cli.script_or_profile import (
    OWN_OPTIONS_FIRST,
    in_place_option,
    lever_option,
    output_option,
    script_arguments,
    write,
)
from lowtide.errors import Infeasible, LowtideError, OverBudget
from lowtide.utils.messages import say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lowtide.planner.records import Plan
    from lowtide.report.run_record import RunRecord
    from lowtide.script.fit_steps import StepFitter
    from lowtide.script.plan_monitor import PlanMonitor
    from lowtide.script.run_verdict import RunVerdict
    from lowtide.script.runner import Script
    from lowtide.utils.amounts import BudgetFor


@click.command("run", context_settings=OWN_OPTIONS_FIRST)
@click.option(
    "--budget",
    metavar="AMOUNT",
    help='Limit for the peak of a step, counting all memory: "8GiB", "500MB", or "60%" of the peak without Lowtide; on '
    'a GPU also "90% of gpu", or "auto": the free memory minus 8 % for fragmentation.',
)
@click.option(
    "--budget-for",
    type=click.Choice(["requested", "reserved"]),
    default="requested",
    help="Bytes that --budget limits: requested by tensors, or reserved by the allocator (not yet tried on a GPU).",
)
@click.option(
    "--plan", "plan_file", type=click.Path(exists=True, dir_okay=False), help="A plan file, instead of --budget."
)
@output_option("--save", "save_to", "Write the plan for --budget to FILE, which --plan can read the next time.")
@output_option(
    "--json", "json_to", 'Write the record for `lowtide report` to FILE; "-": to stdout, after the script\'s output.'
)
@report_option
@lever_option
@in_place_option
@click.option("--no-progress", is_flag=True, help="Show no progress bars; lines are still written.")
@click.option(
    "--retry", is_flag=True, help="If a step runs out of memory, repeat it once under the plan with the smallest peak."
)
@script_arguments()
def run(
    budget: str | None,
    budget_for: BudgetFor,
    plan_file: str | None,
    save_to: str | None,
    json_to: str | None,
    report_to: str | None,
    levers: tuple[str, ...],
    no_in_place: bool,
    no_progress: bool,
    retry: bool,
    target: str,
    args: tuple[str, ...],
    is_module: bool,
) -> int:
    """Run a training SCRIPT within a memory budget, or under a plan.

    Options of this command come before SCRIPT; everything after it is passed to the script.

    With --budget the first two training steps are rehearsed: every allocation is recorded, and a plan is made. The
    plan is in force from the third step on, whose peak is measured. With --plan, it is in force from the first step on,
    and the peak of the second step is measured. Training is bit-identical to a run without Lowtide, unless --lever
    changes the step.

    Rehearsed steps may exceed the budget: they need about as much memory as checkpointing every block. If batch sizes
    vary, or the model is compiled as a whole, they may need as much as a step without Lowtide.

    If batch sizes vary, the plan is made once the largest size has come twice, or after 20 steps. A larger batch that
    comes later runs under the plan with the smallest peak, and a message says so. The next batch of that size is
    rehearsed and gets its own plan.

    With --retry, a step that runs out of memory is repeated once under the plan with the smallest peak, with the same
    results. If it cannot be repeated, the error says why.

    Exit code 1: no plan fits the budget, or the measured peak is above it; 2: no plan can be made, or the script ends
    before a plan is in force (for example because it trains nothing). Otherwise: the script's own exit code.

    Experimental: models and blocks compiled by torch.compile (tested with small models on a CPU), and several processes
    of torchrun (tested with two on a CPU).
    """
    _check_options(
        budget,
        plan_file,
        {
            "--report": (bool(report_to), "comes from another run's rehearsal"),
            "--json": (bool(json_to), "comes from another run's rehearsal"),
            "--save": (bool(save_to), "is in a file already"),
            "--lever": (bool(levers), "says which levers it has"),
            "--no-in-place": (no_in_place, "says what it writes in place"),
            "--budget-for": (budget_for == "reserved", "says which bytes it bounds"),
        },
    )

    from lowtide.levers import parse_script_lever
    from lowtide.memory.device_budget import check_on_device
    from lowtide.planner.records import Plan
    from lowtide.script.apply_plan import PlanApplier
    from lowtide.script.fit_steps import StepFitter
    from lowtide.script.runner import Script

    if budget is not None:
        check_on_device(budget, None, budget_for)
    script = Script(target=target, args=args, is_module=is_module)
    if plan_file is not None:
        return _train(script, PlanApplier(Plan.from_json(Path(plan_file)), say, retry=retry))
    assert budget is not None
    importlib.import_module("scipy.optimize")  # load the solver before the script takes all the memory
    monitor = StepFitter(
        budget,
        say,
        tuple(map(parse_script_lever, levers)),
        budget_for=budget_for,
        in_place=not no_in_place,
        retry=retry,
        progress=not no_progress,
    )
    kept = _KeptPlan(monitor, save_to, json_to, report_to)
    monitor.when_kept = kept.keep
    try:
        code = _train(script, monitor)
    except (Infeasible, OverBudget) as why:
        kept.report_refusal(why, budget_for)
        raise
    kept.report()
    return code or _choose_exit_code(monitor.plans.verdict)


def _check_options(budget: str | None, plan_file: str | None, needing_budget: Mapping[str, tuple[bool, str]]) -> None:
    """Raise UsageError unless exactly one of `--budget` and `--plan` is given, and no option that can't be combined
    with it.

    `needing_budget` holds, for each option that needs `--budget`, True if the option is given, and the reason why a
    plan file makes it useless.
    """
    if (budget is None) == (plan_file is None):
        raise click.UsageError(
            "give either --budget or --plan, before the script: everything after it is passed to the script."
        )
    for option, (is_given, why) in needing_budget.items():
        if is_given and budget is None:
            raise click.UsageError(f"{option} needs --budget: the plan of --plan {why}.")


class _KeptPlan:
    """Writer of the plan that stays in force: the plan's file is written at once, its report when the script has
    ended.
    """

    def __init__(self, monitor: StepFitter, save_to: str | None, json_to: str | None, report_to: str | None) -> None:
        self._monitor, self._save_to, self._json_to, self._report_to = monitor, save_to, json_to, report_to
        self._command = format_command_line()
        self._record: RunRecord | None = None

    def keep(self, plan: Plan) -> None:
        """Save the plan, and remember its record for the report."""
        from lowtide.report.run_record import build_record

        if self._save_to is not None:
            _save(self._save_to, plan)
        if self._is_reported and self._monitor.plans.verdict is not None:
            proof = self._monitor.plans.verdict.to_proof()
            self._record = build_record(self._command, profile=self._monitor.plans.profile, plan=plan, proof=proof)

    def report(self) -> None:
        """Write the report, if an option asks for one and a plan was kept."""
        from lowtide.report.run_record import with_frontier, with_step_time

        if self._is_reported and self._record is not None and self._record.plan is not None:
            planned_ms = self._monitor.step_ms_under(self._record.plan)
            self._write(with_frontier(with_step_time(self._record, planned_ms)))

    def report_refusal(self, why: Infeasible | OverBudget, budget_for: BudgetFor) -> None:
        """Write a report of the rehearsed step and of the error, if an option asks for one and a step was rehearsed."""
        from lowtide.report.run_record import build_record, with_frontier

        if self._is_reported and self._monitor.plans.profile is not None:
            refused = replace(build_record(self._command, profile=self._monitor.plans.profile), refusal=str(why))
            if budget_for == "requested":  # like all other bytes in the record
                refused = replace(refused, plain_budget_bytes=why.budget_bytes)
            self._write(with_frontier(refused))

    @property
    def _is_reported(self) -> bool:
        return self._json_to is not None or self._report_to is not None

    def _write(self, record: RunRecord) -> None:
        if self._json_to is not None:
            write(record.to_json(), self._json_to)
        if self._report_to is not None:
            write_report(record, self._report_to)


def _train(script: Script, monitor: PlanMonitor) -> int:
    """Run the script under `monitor`, print the number of repeated steps, and return the script's exit code."""
    from lowtide.script.repeat_step import format_repeat_count
    from lowtide.script.run_listened import run_watched

    code = run_watched(script, monitor)
    if monitor.repeats.n:
        say(format_repeat_count(monitor.repeats.n))
    return code


def _choose_exit_code(verdict: RunVerdict | None) -> int:
    """Return exit code 1, with a message, if the plan in force at the end of the script exceeded its budget, else 0."""
    if verdict is None or verdict.measured_peak_bytes is None or verdict.within_budget:
        return 0
    say(f"the script ended, and later steps were above the budget, so the exit code is 1: {verdict}")
    return 1


def _save(to: str, plan: Plan) -> None:
    """Write the plan that stays in force to the file `to`. If that fails, report it and let training continue."""
    try:
        write(plan.to_json(), to)
    except LowtideError as why:
        say(f"the plan is not saved; training continues: {why}")
