"""Measure the scripts of examples/ plainly, with the remedy of their articles, and under `lowtide run --budget`.

    python bench/articles.py                  # measure all, then renew docs/articles.md and docs/articles.ja.md
    python bench/articles.py gpt_mask ...     # measure these alone; the other numbers stay
    python bench/articles.py --resume ...     # measure only the rows that are missing, after a run that was cut off
    python bench/articles.py --tables         # renew both pages from docs/articles.json

Each run is a process of its own with one thread. Its time is the least processor time of the steps after the fourth.
Its peak is that of its last step, computed from the allocator's events: all tensors of the process, from one
`optimizer.step()` to the next. Nothing is recorded while steps are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec

from lowtide.units import format_bytes, format_time

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "articles.json"
PAGES = {"en": ROOT / "docs" / "articles.md", "ja": ROOT / "docs" / "articles.ja.md"}
STEPS = 8
"""Number of steps of a run. Plans are in force from the third step at the latest."""
TIMED_FROM = 4
"""Number of steps before the first timed step."""


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A way to run a script, with its measurements."""

    command: str
    peak_bytes: int | None = None
    step_ms: float | None = None
    same: bool | None = None
    """True if the run printed the lines of the plain run, number by number."""
    within: Literal["", "share", "hand", "smallest"] = ""
    """The budget of a run under Lowtide: a share of the plain peak, the least peak reached by hand, or the smallest
    budget.
    """
    refused: str = ""
    """The last lines of the error of a run that ended early."""
    printed: str = ""
    """SHA-256 of the printed lines."""


@dataclass(frozen=True, slots=True)
class Example:
    """A script, and the arguments that turn on the remedy of its article."""

    script: str
    by_hand: tuple[str, ...] = ("--checkpoint",)
    args: str = ""
    share: int = 0
    """The budget in percent of the plain peak; 0 for the least peak reached by hand."""


EXAMPLES = {
    "del_loss": Example("del_loss", ("--delete loss", "--delete output"), share=60),
    "bert_layers": Example("bert_layers"),
    "resnet_blocks": Example("resnet_blocks"),
    "training_loop": Example("training_loop", args="--epochs 1"),
    "gpt_mask": Example("gpt_mask", ("--checkpoint late", "--checkpoint bound")),
    "known_errors": Example("known_errors", ("--checkpoint reentrant", "--checkpoint non-reentrant")),
    "mixed_precision": Example("mixed_precision"),
    "compiled_blocks": Example("compiled_blocks", args="--backend aot_eager"),
    "accumulation": Example("accumulation", ("--pieces 4",)),
    **{f"sqrt_depth_{n}": Example("sqrt_depth", args=f"--layers {n}") for n in (4, 8, 16, 32, 64)},
}
GPU, ON_GPU = "rtx 4090", "peak_memory"


# --- one run, in a process of its own -------------------------------------------------------------------------------


@contextlib.contextmanager
def observed(found: dict[str, Any]) -> Iterator[None]:
    """Time the optimizer's steps of the code in this block, and record the memory of the last one; write both into
    `found`.
    """
    # imported here, because the process that starts the runs needs no torch
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from lowtide.memory.cpu_recorder import CpuRecorder
    from lowtide.memory.memory_timeline import Timeline
    from lowtide.profiler.other_memory import with_others
    from lowtide.runtime.static_memory import static_bytes

    ends: list[float] = []
    recorder = CpuRecorder()

    def model_of(optimizer: Optimizer) -> nn.Module:
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        modules = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
        return next(m for m in modules if updated == {id(p) for p in m.parameters()})

    def stepped(optimizer: Optimizer, args: object, kwargs: object) -> None:
        ends.append(time.process_time())
        if len(ends) == STEPS - 1:
            found["static"] = static_bytes(model_of(optimizer), [], [optimizer])
            recorder.__enter__()
        elif len(ends) == STEPS:
            recorder.__exit__(None, None, None)
            static, addresses = found.pop("static")
            entry_bytes = with_others(static, addresses, recorder).total
            found["peak_bytes"] = entry_bytes + Timeline(recorder.stream).peak_bytes

    torch.set_num_threads(1)
    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        handle.remove()
    between = [1000 * (after - before) for before, after in pairwise(ends)]
    found["step_ms"] = min(between[TIMED_FROM - 1 : STEPS - 2], default=None)


def work(to: str, budget: str, script: str, args: Sequence[str]) -> int:
    """Run one script, under `lowtide run` if `budget` is not empty, and write the numbers to the file `to`."""
    found: dict[str, Any] = {}
    with observed(found):
        if budget:
            from lowtide.cli import main

            code = main(["run", "--budget", budget, script, *args])
        else:
            sys.argv = [script, *args]
            runpy.run_path(script, run_name="__main__")
            code = 0
    Path(to).write_text(json.dumps(found), encoding="utf-8")
    return code


# --- all runs -------------------------------------------------------------------------------------------------------


def run(example: Example, by_hand: str = "", budget: str = "", known: Sequence[Run] = ()) -> Run:
    """Run an example's script, and return its numbers; those in `known` are returned without running it again."""
    script = f"examples/{example.script}.py"
    args = [*example.args.split(), *by_hand.split()]
    command = " ".join([f"lowtide run --budget {budget}" if budget else "python", script, *args])
    for each in known:
        if each.command == command and (each.printed or each.refused):
            return each
    numbers = ROOT / f".articles-{os.getpid()}.json"
    call = [sys.executable, __file__, "--work", str(numbers), f"--run-within={budget}", script]
    call += [*args, f"--steps={STEPS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    try:
        found = json.loads(numbers.read_text(encoding="utf-8")) if numbers.exists() else {}
    finally:
        numbers.unlink(missing_ok=True)
    if done.returncode:
        return Run(command=command, refused=done.stderr.strip()[-2000:])
    printed = hashlib.sha256(done.stdout.encode()).hexdigest()
    return Run(command=command, peak_bytes=found["peak_bytes"], step_ms=found["step_ms"], printed=printed)


def measure(example: Example, known: Sequence[Run]) -> Iterator[Run]:
    """Run a script plainly, with each remedy by hand, and within a budget.

    The budget is the example's share of the plain peak, or else the least peak reached by hand.
    """
    plain = run(example, known=known)
    if plain.peak_bytes is None:
        raise SystemExit(f"{plain.command} failed:\n{plain.refused}")
    yield plain
    least_bytes = plain.peak_bytes
    for by_hand in example.by_hand:
        of_hand = run(example, by_hand, known=known)
        least_bytes = min(of_hand.peak_bytes or least_bytes, least_bytes)
        same = None if of_hand.refused else of_hand.printed == plain.printed
        yield msgspec.structs.replace(of_hand, same=same)
    name: Literal["share", "hand", "smallest"] = "share" if example.share else "hand"
    budget_bytes = example.share * plain.peak_bytes // 100 if example.share else least_bytes
    within = run(example, budget=format_bytes(budget_bytes, round_up=True).replace(" ", ""), known=known)
    if (smallest := re.search(r"Smallest peak: ([\d.]+) ([KMG]iB)", within.refused)) is not None:
        within = run(example, budget=smallest[1] + smallest[2], known=known)
        name = "smallest"
    if within.refused:
        raise SystemExit(f"{within.command} failed:\n{within.refused}")
    yield msgspec.structs.replace(within, same=within.printed == plain.printed, within=name)


def estimated() -> list[str]:
    """Run `examples/peak_memory.py` under `lowtide estimate --device`; return the lines that it prints on stderr."""
    call = [sys.executable, "-m", "lowtide", "estimate", "--device", GPU, f"examples/{ON_GPU}.py"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if re.fullmatch(r"[a-z ]+: [\d]+ MiB", line)]


# --- the pages ------------------------------------------------------------------------------------------------------


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of all examples."""

    versions: dict[str, str]
    runs: dict[str, list[Run]]
    estimate: list[str] = []


HEADS = {
    "en": ("run", "peak", "of plain", "time of a step", "printed numbers"),
    "ja": ("実行", "ピーク", "元に対する割合", "1 ステップの時間", "出力された数値"),
}
WORDS = {
    "en": {
        "same": "the same",
        "other": "differ",
        "smallest": " (smallest budget possible)",
        "hand": " (peak by hand)",
        "layers": "layers",
        "plain": "plain: peak",
        "by hand": "by hand: peak",
        "within": "Lowtide: peak",
        "time": "time",
        "refused": "ends with an error",
    },
    "ja": {
        "same": "同じ",
        "other": "異なる",
        "smallest": "（到達できる最小の予算）",
        "hand": "（手動のピーク）",
        "layers": "層数",
        "plain": "元の実行のピーク",
        "by hand": "手動のピーク",
        "within": "Lowtide のピーク",
        "time": "時間",
        "refused": "エラーで終了",
    },
}


def table(runs: Sequence[Run], language: str) -> str:
    """Format one example's runs as a Markdown table, with words in `language`."""
    words, plain = WORDS[language], runs[0]
    lines = [_row(HEADS[language]), "|---|---:|---:|---:|---|"]
    for each in runs:
        command = f"`{each.command}`{words.get(each.within, '')}"
        if each.peak_bytes is None or each.step_ms is None:
            lines.append(_row((command, "", "", "", words["refused"])))
            continue
        assert plain.peak_bytes is not None
        assert plain.step_ms is not None
        same = "" if each.same is None else words["same" if each.same else "other"]
        time_cell = format_time(each.step_ms)
        if each is not plain:
            time_cell = _percent(each.step_ms / plain.step_ms - 1)
        share = f"{100 * each.peak_bytes / plain.peak_bytes:.0f} %"
        lines.append(_row((command, format_bytes(each.peak_bytes), share, time_cell, same)))
    return "\n".join(lines)


def format_depth_table(results: Results, language: str) -> str:
    """Format peaks and times over the number of layers as a Markdown table."""
    words = WORDS[language]
    head = (words["layers"], words["plain"], words["by hand"], words["time"], words["within"], words["time"])
    lines = [_row(head), "|---:|---:|---:|---:|---:|---:|"]
    for name, runs in results.runs.items():
        if not name.startswith("sqrt_depth") or not runs[-1].within:
            continue
        cells = [name.rpartition("_")[2], format_bytes(runs[0].peak_bytes or 0)]
        for each in runs[1:]:
            assert each.step_ms is not None
            assert runs[0].step_ms is not None
            cells += [format_bytes(each.peak_bytes or 0), _percent(each.step_ms / runs[0].step_ms - 1)]
        lines.append(_row(cells))
    return "\n".join(lines)


def renewed(page: str, results: Results, language: str) -> str:
    """Return the page with its tables made from `results`; two comments around each table name its example."""

    def made(match: re.Match[str]) -> str:
        name = match[1]
        if name == "sqrt_depth":
            text = format_depth_table(results, language)
        elif name == ON_GPU and results.estimate:
            text = "\n".join(["```text", *results.estimate, "```"])
        elif any(each.within for each in results.runs.get(name, ())):
            text = table(results.runs[name], language)
        else:
            return match[0]  # not measured so far
        return f"<!-- {name} -->\n\n{text}\n\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


def _percent(part: float) -> str:
    return f"{100 * part:+.0f} %"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    """Measure the examples that the command line names, and renew both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*EXAMPLES, ON_GPU])} (default: all)")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are measured")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    given = parser.parse_args(arguments)
    if unknown := {*given.names} - {*EXAMPLES, ON_GPU}:
        parser.error(f"there is no example {', '.join(sorted(unknown))}")
    for name in () if given.tables else given.names or [*EXAMPLES, ON_GPU]:
        if name == ON_GPU:
            if not (given.resume and read().estimate):
                save(estimate=estimated())
            continue
        rows: list[Run] = []
        for row in measure(EXAMPLES[name], read().runs.get(name, []) if given.resume else []):
            rows.append(row)
            save(name, rows)
            print(row, flush=True)
    for language, page in PAGES.items():
        if page.exists():
            page.write_text(renewed(page.read_text(encoding="utf-8"), read(), language), encoding="utf-8")


def save(name: str = "", rows: Sequence[Run] = (), estimate: Sequence[str] = ()) -> None:
    """Store the rows of one example, or the lines of the estimate, in the file of results."""
    results = read()  # now: another process may have written its own
    ordered = {each: [*rows] if each == name else results.runs.get(each, []) for each in EXAMPLES}
    results = Results(
        versions={package: version(package) for package in ("torch", "transformers")},
        runs={each: found for each, found in ordered.items() if found},
        estimate=[*estimate] or results.estimate,
    )
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


def read() -> Results:
    """Read all results from their file; they are empty if there is no file."""
    if not RESULTS.exists():
        return Results(versions={}, runs={})
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        sys.exit(work(sys.argv[2], sys.argv[3].partition("=")[2], sys.argv[4], sys.argv[5:]))
    main(sys.argv[1:])
