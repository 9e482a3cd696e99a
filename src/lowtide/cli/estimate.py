"""`lowtide estimate`: predict the memory that a script's training step needs, here or on a GPU that may be absent."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.report_option import format_command_line, report_option, write_report
from lowtide.cli.script_or_profile import (
    OWN_OPTIONS_FIRST,
    check_output_file,
    is_profile,
    output_option,
    script_arguments,
    write,
)
from lowtide.units import format_apart
from lowtide.utils.messages import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lowtide.estimator.memory_estimate import MemoryEstimate
    from lowtide.estimator.unrehearsed_plans import How
    from lowtide.memory.gpu_specs import GpuSpec
    from lowtide.report.run_record import RunRecord


SLOW_S = 30
"""Seconds without training after which the user is told that everything before training is really computed."""

_STAND_INS = "from here on nothing is computed: numbers that the script prints stand in for true ones"


@click.command("estimate", context_settings=OWN_OPTIONS_FIRST)
@click.option(
    "--device",
    metavar="GPU",
    help='A GPU, which this machine need not have: "A100-40", "RTX 4090", or its memory, as in "cuda:24GiB"; for a '
    'script that torchrun starts, several: "8 x H100-80". Default: the device that the script uses on this machine.',
)
@click.option(
    "--budget",
    metavar="AMOUNT",
    help='Without --device: exit code 1 if the peak is above this amount, "8GiB" or "500MB".',
)
@click.option(
    "--rank", type=click.IntRange(0), help="With several GPUs: estimate this rank instead of the first and the last."
)
@click.option(
    "--fewest",
    is_flag=True,
    help="Also find how many of each known GPU are enough, among 1, 2, 4 ... 64, without and with a plan.",
)
@click.option(
    "--how",
    type=click.Choice(("plain", "recomputed", "replayed")),
    default="plain",
    show_default=True,
    help="With --device: the step to estimate. plain: as it is. recomputed: everything is recomputed except matrix "
    "products, convolutions and attention. replayed: each repeated block is replayed as well. Plans lie between these.",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False),
    help="Estimate the step under the plan in this file, for one device or for each of several GPUs.",
)
@click.option("--strict", is_flag=True, help="Exit code 1 also if some of the memory is not known exactly.")
@click.option("--batch", "sizes", type=click.IntRange(1), multiple=True, help="Size of the batch; may be repeated.")
@click.option(
    "--snapshot",
    "snapshot_to",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True),
    callback=check_output_file,
    help="Write the memory of the two steps to FILE, as a snapshot for pytorch.org/memory_viz.",
)
@output_option("--json", "json_to", 'Write the estimate to FILE as JSON; "-": print only that.')
@click.option("--record", "record_to", hidden=True, help="Write the estimate to FILE as JSON, without mentioning it.")
@report_option
@script_arguments()
def estimate(
    device: str | None,
    budget: str | None,
    rank: int | None,
    fewest: bool,
    how: How,
    plan_file: str | None,
    strict: bool,
    sizes: tuple[int, ...],
    snapshot_to: str | None,
    json_to: str | None,
    record_to: str | None,
    report_to: str | None,
    target: str,
    args: tuple[str, ...],
    is_module: bool,
) -> int:
    """Predict the memory that a training step of SCRIPT needs, without taking the step.

    Options of this command come before SCRIPT; everything after it is passed to the script. From the first training
    forward on, the script runs on fake tensors, which take no memory, and ends after two steps. A script with a single
    step runs to its end; a loop without an optimizer, to its end or for 32 backward passes. With --batch the script
    runs once for each size.

    Without --device the answer is the peak of the step on this machine, in the bytes that its tensors request. Exit
    code 0: the peak is within --budget, or no budget is given; 1: it is above; 2: there is no answer.

    With --device the answer states the bytes that the step requests, the bytes that the allocator reserves, and whether
    these fit on the GPU. Exit code 0: every step fits; 1: one does not fit, or might not; 2: there is no answer. For
    recurrent layers, cuDNN's memory was measured on one GPU model only, so it does not count as known for --strict.

    With several GPUs, the script runs once as the first and once as the last process that torchrun would start. The
    other processes are simulated: nothing is sent. This is experimental: it has been compared with four processes on a
    CPU. NCCL's memory is a range from public reports, so with --strict the exit code is always 1. --batch and --report
    need --rank.

    With --plan the steps run under a plan from `lowtide plan make` or `lowtide run --save`. Exit code 2: the plan is
    not for the model that the script trains.
    """
    if is_profile(target, is_module=is_module):
        raise click.UsageError(f"{target} is a profile, and an estimate needs a script: give the script.")
    if snapshot_to is not None and len(sizes) > 1:
        raise click.UsageError("--snapshot records one step: give --batch once.")

    # invalid values are rejected before torch is loaded
    from lowtide.memory.gpu_specs import parse_gpus
    from lowtide.utils.amounts import parse_bytes

    gpu, n_gpus = (None, None) if device is None else parse_gpus(device)
    _check_budget(gpu, budget)
    budget_bytes = None if budget is None else parse_bytes(budget)
    _check_how(gpu, how, fewest=fewest)
    if plan_file is not None and (fewest or sizes or how != "plain"):
        raise click.UsageError("--plan is for the step and the batch that it was made for: leave the other out.")
    _check_several(gpu, n_gpus, rank, fewest=fewest, has_report=report_to is not None)

    from lowtide.planner.records import Plan
    from lowtide.script.runner import INTERRUPTED, Script

    plan = None if plan_file is None else Plan.from_json(Path(plan_file))
    script = Script(target=target, args=args, is_module=is_module)
    if gpu is not None and n_gpus is not None and rank is None:  # only the started processes load torch
        if sizes:
            raise click.UsageError("--batch works with one GPU. For several, set the batch size in the script.")
        from lowtide.cli.several_gpus import SeveralGpus

        several = SeveralGpus(gpu, script, how, plan_file, strict=strict, snapshot_to=snapshot_to)
        return several.estimate(n_gpus, json_to, fewest=fewest)

    from lowtide.utils.optional_deps import require_torch

    require_torch("lowtide estimate")
    from lowtide.cli.estimate_table import is_within, record, sweep, under_plan
    from lowtide.estimator.absent_processes import AbsentProcesses
    from lowtide.script.estimate_steps import estimate_script

    processes = None if n_gpus is None else AbsentProcesses(size=n_gpus, rank=rank or 0)
    estimates: dict[int | None, MemoryEstimate] = {}
    for size in sizes or (None,):
        with contextlib.redirect_stdout(sys.stderr), _explain_if_slow(target) as is_training:
            code, estimate = estimate_script(
                script,
                gpu,
                size,
                on_entered=is_training if estimates else partial(is_training, _STAND_INS),
                processes=processes,
                how=how,
                plan=plan,
            )
        if estimate is None:
            if code != INTERRUPTED:
                click.echo(_ended(target, code, size), err=True)
            return INTERRUPTED if code == INTERRUPTED else 2
        estimates[size] = estimate
        if snapshot_to is not None:
            estimate.to_snapshot(snapshot_to)
        if json_to != "-" and len(sizes) < 2:
            click.echo(str(estimate))
            if plan is not None:
                click.echo(under_plan(plan, estimate))
    if json_to != "-" and len(sizes) > 1:
        click.echo(sweep(estimates))
    if json_to != "-" and budget_bytes is not None:
        click.echo("\n".join(_compare_with_budget(budget_bytes, estimates)))
    records = [record(estimate, size, budget_bytes, plan) for size, estimate in estimates.items()]
    _write_files(records, json_to, record_to)
    if report_to is not None:
        write_report(_record(estimates, target, budget_bytes), report_to)
    return 0 if all(is_within(estimate, budget_bytes, strict=strict) for estimate in estimates.values()) else 1


def _check_budget(gpu: GpuSpec | None, budget: str | None) -> None:
    """Raise UsageError if `--budget` is given together with `--device`."""
    if gpu is not None and budget is not None:
        raise click.UsageError(
            f"--budget is a limit on this machine, and --device asks whether the step fits on {gpu.name}."
        )


def _check_how(gpu: GpuSpec | None, how: How, *, fewest: bool) -> None:
    """Raise UsageError for a `--how` that can't be combined with the other options."""
    if gpu is None and how != "plain":
        raise click.UsageError("--how is for a GPU: add --device.")
    if fewest and how != "plain":
        raise click.UsageError("--fewest answers for each --how: leave --how out.")


def _check_several(
    gpu: GpuSpec | None, n_gpus: int | None, rank: int | None, *, fewest: bool, has_report: bool
) -> None:
    """Raise UsageError for options of several GPUs that can't be combined with `--device` or with each other."""
    if gpu is None and (rank is not None or fewest):
        raise click.UsageError('--rank and --fewest are for several GPUs, as in --device "8 x H100-80".')
    if gpu is not None and n_gpus is None and (rank is not None or fewest):
        raise click.UsageError(f'--rank and --fewest are for several GPUs, as in --device "8 x {gpu.name}".')
    if n_gpus is not None and rank is not None and rank >= n_gpus:
        raise click.UsageError(f"--rank {rank}: the ranks of {n_gpus} GPUs are 0 to {n_gpus - 1}.")
    if rank is not None and fewest:
        raise click.UsageError("--fewest is for all processes: leave --rank out.")
    if n_gpus is not None and rank is None and has_report:
        raise click.UsageError("--report is of one process: add --rank 0.")


def _compare_with_budget(budget_bytes: int, estimates: Mapping[int | None, MemoryEstimate]) -> Iterator[str]:
    """Yield a line for each batch size: the peak compared with the budget."""
    for size, estimate in estimates.items():
        budget, peak = format_apart(budget_bytes, estimate.peak_bytes)
        words = "is within" if estimate.peak_bytes <= budget_bytes else "is above"
        yield f"{'' if size is None else f'batch {size}: '}{peak} {words} the budget of {budget}"


def _write_files(records: list[dict[str, Any]], json_to: str | None, record_to: str | None) -> None:
    """Write the estimates as JSON to the files of `--json` and `--record`."""
    text = json.dumps(records, indent=1)
    if json_to is not None:
        write(text, json_to)
    if record_to is not None:
        Path(record_to).write_text(text, encoding="utf-8")


def _record(estimates: Mapping[int | None, MemoryEstimate], target: str, budget_bytes: int | None) -> RunRecord:
    """Return the RunRecord of the estimates for all batch sizes; its memory over the step is from the last estimate."""
    from lowtide.estimator.cuda.gpu_estimate import GpuMemoryEstimate

    shown = estimates[[*estimates][-1]].to_record(format_command_line(), subject=target)
    needs = (estimate.on_gpu(size) for size, estimate in estimates.items() if isinstance(estimate, GpuMemoryEstimate))
    return replace(shown, needs=tuple(needs), plain_budget_bytes=budget_bytes)


@contextlib.contextmanager
def _explain_if_slow(target: str) -> Iterator[Callable[..., None]]:
    """Print one hint during this block if the script has not begun to train after SLOW_S seconds.

    Yields a function that the script's first training step calls: the function cancels the hint, and prints the texts
    passed to it.
    """
    timer = threading.Timer(
        SLOW_S,
        say,
        [
            f"{target} has run for {SLOW_S} s and has not trained yet. Up to its first training step everything is "
            "computed, on this machine: leave out or shorten what takes long, such as an evaluation"
        ],
    )
    timer.daemon = True
    timer.start()

    def is_training(*texts: str) -> None:
        timer.cancel()
        for text in texts:
            say(text)

    try:
        yield is_training
    finally:
        timer.cancel()


def _ended(target: str, code: int, size: int | None) -> str:
    ended = f"lowtide: {target} ended with exit code {code}, before two steps of it were rehearsed."
    if size is None:
        return ended
    return (
        f"{ended}\n  With --batch {size} all tensors that the model is given, or a variable holds, get that length "
        "where their first dimension is as long as the batch; everything else keeps its size.\n"
        "  Give the script that batch size itself."
    )
