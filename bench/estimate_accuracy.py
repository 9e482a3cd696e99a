"""Accuracy of estimated peaks compared with measured ones, and the cost of estimating.

    python bench/estimate_accuracy.py [ZOO.py]           every entry of a zoo: `model, batch, step = ZOO[name]()`
    python bench/estimate_accuracy.py --gpt2 small|xl    time and host memory of two whole steps, AdamW, 8 x 1024 tokens

The zoo of the tests is the default. Peaks of the same step are measured by recording the CPU allocator
(`lowtide.timeline`); both peaks are over entry. GPT-2 small has real parameters, GPT-2 XL parameters on the meta
device.
"""

import argparse
import importlib.util
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import lowtide

TESTS = Path(__file__).parents[1] / "tests" / "zoo.py"


def compare(path: Path) -> None:
    """Print a row for each entry of the zoo in the file `path`, and the median and worst error."""
    sys.path.insert(0, str(path.parent))  # the folder of modules that the zoo imports
    spec = importlib.util.spec_from_file_location("zoo", path)
    assert spec is not None
    assert spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    errors = []
    print(f"{'entry':20} {'estimated':>12} {'measured':>12} {'error':>10} {'seconds':>8}  not known; assumed")
    for name, build in zoo.ZOO.items():
        model, batch, step = build()
        began = time.process_time()
        try:
            estimated = lowtide.estimate(model, step, batch)
        except lowtide.RehearsalError as error:
            print(f"{name:20} {str(error).splitlines()[0]}", flush=True)
            continue
        seconds = time.process_time() - began
        torch.manual_seed(1)
        measured = lowtide.timeline(model, step, batch).peak_bytes
        error = estimated.timeline.peak_bytes / measured - 1
        errors.append(abs(error))
        notes = f"{len(estimated.unknown)}; {len(estimated.assumed)}"
        print(
            f"{name:20} {estimated.timeline.peak_bytes:>12,} {measured:>12,} {error:>+10.4%} {seconds:>8.1f}  {notes}",
            flush=True,
        )
    print(f"\nerror: median {statistics.median(errors):.4%}, worst {max(errors):.4%}, of {len(errors)} entries")


def gpt2(size: str) -> None:
    """Print the time and host memory of estimating two steps of GPT-2, and the estimate."""
    sizes: dict[str, Any] = {"small": {}, "xl": dict(n_layer=48, n_embd=1600, n_head=25)}
    with torch.device("cpu" if size == "small" else "meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes[size])).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 50257, (8, 1024))

    def step(batch: dict[str, torch.Tensor]) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    began, began_cpu = time.perf_counter(), time.process_time()
    estimated = lowtide.estimate(model, step, {"input_ids": ids, "labels": ids})
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"GPT-2 {size}: {wall:.1f} s ({cpu:.1f} s of processor), {host:.2f} GiB of host memory in all\n\n{estimated}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", nargs="?", type=Path, default=TESTS)
    parser.add_argument("--gpt2", choices=["small", "xl"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if options.gpt2:
        gpt2(options.gpt2)
    else:
        compare(options.zoo)


if __name__ == "__main__":
    main()
