"""Lowtide compared with other ways to save activation memory: exact bytes, exact FLOPs, paired times, equal bits.

    python bench/peers.py                      # all models, some 19 minutes on two cores
    python bench/peers.py --models gpt2 vit    # these again; the other models' results stay
    python bench/peers.py --quick              # small models and few turns, into a temporary folder: does it all run?
    python bench/peers.py --page               # only write page and pictures again from the results

Writes docs/benchmarks.json and docs/benchmarks.md, and for each model the pictures docs/frontier-MODEL.svg (extra time)
and docs/frontier-MODEL-flops.svg, with the peers' points in docs/frontier-MODEL.json. torch-remat takes part if it is
installed (`pip install torch-remat`).
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from contest import allocator, frontiers
from contest.claims import claims
from contest.page import page
from contest.records import Contest, Results

from lowtide.utils.optional_deps import require_pictures

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODELS = ("gpt2", "gpt2-dropout", "llama", "bert", "vit", "resnet")


def main() -> None:
    options = parsed()
    if options.worker:
        work(options)
        return
    folder = Path(options.out) if options.out else Path(tempfile.mkdtemp()) if options.quick else DOCS
    folder.mkdir(parents=True, exist_ok=True)
    results_file = folder / "benchmarks.json"
    known = Results.from_json(results_file) if results_file.exists() else Results(command="", contests=())
    command = "python bench/peers.py" + (" --quick" if options.quick else "")
    require_pictures("python bench/peers.py")
    failed = []
    for name in () if options.page else options.models:
        print(f"== {name}", flush=True)
        try:
            contest = run(name, options)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} (exit code {error.returncode})")
            continue
        known = known.merged(Results(command=command, contests=(contest,)))
        known.to_json(results_file)  # after each model, so that a run that is cut off keeps its results
    (folder / "benchmarks.md").write_text(page(known), encoding="utf-8")
    for contest in known.contests:
        frontiers.write(contest, folder)
    print(f"\nwritten: {results_file}; benchmarks.md and pictures beside it\n")
    for claim in claims(known):
        said = {True: "held", False: "NOT held", None: "not measured"}[claim.held]
        print(f"{said:13} {claim.text}: {claim.found}")
    if failed:
        sys.exit(f"no results of {', '.join(failed)}: the output above says why")


def run(name: str, options: argparse.Namespace) -> Contest:
    """Run one model's contest in a process of its own, which starts with malloc's settings in force; return the
    results.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "contest.json"
        arguments = [sys.executable, __file__, "--worker", "--models", name, "--out", str(out)]
        arguments += ["--rounds", str(options.rounds)] if options.rounds is not None else []
        arguments += ["--quick"] if options.quick else []
        subprocess.run(arguments, env=allocator.environment(), check=True)
        return Contest.from_json(out)


def work(options: argparse.Namespace) -> None:
    """Run the contest of one model in this process, and write the results to the file `--out`."""
    assert allocator.in_force(), "malloc reads its settings when a process starts"
    import torch._dynamo  # noqa: F401  # else the first peer that compiles would
    from contest.running import Running

    # Imported modules stay alive. Frozen, they cost no time in the garbage collections of each measured step.
    gc.collect()
    gc.freeze()

    (name,) = options.models
    Running(name, options.quick, options.rounds, partial(print, flush=True)).run().to_json(options.out)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--quick", action="store_true", help="small models, few turns, into a temporary folder")
    parser.add_argument(
        "--rounds", type=int, help="rounds for the times (default: 3, and more where they are claimed; 0: none)"
    )
    parser.add_argument("--out", help="folder for the results (default: docs)")
    parser.add_argument("--page", action="store_true", help="run nothing; write page and pictures from the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
