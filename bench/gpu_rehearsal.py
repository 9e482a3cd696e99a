"""Estimates of a step for a GPU, compared with the same step run on that GPU: requested, allocated and reserved peaks.

    python bench/gpu_rehearsal.py                    every model of the tests' zoo, batches of 64, two steps, AdamW
    python bench/gpu_rehearsal.py gpt2 bert --rows 256
    python bench/gpu_rehearsal.py --record FOLDER    also the allocator's events, sizes and order only, as test data

Each row is measured in a process of its own, as `torch.cuda.memory_stats` counts. It is estimated in a process that
sees no GPU (CUDA_VISIBLE_DEVICES=''), for a GPU of the same memory and compute capability. Both are done with the
allocator's defaults and with expandable segments. Needs a GPU.
"""

import argparse
import gzip
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

import lowtide
from lowtide.estimator.batch_search import measure_size, resized
from lowtide.memory.gpu_specs import GpuSpec

ZOO = Path(__file__).parents[1] / "tests" / "zoo.py"
LEFT_OUT = {"autocast": "asks for autocast on the CPU", "skipping": "has a generator on the CPU"}
SETTINGS = {"default": "", "expandable": "expandable_segments:True"}
PEAKS = ("requested", "allocated", "reserved")

Entry = tuple[torch.nn.Module, Any, Callable[[Any], None]]


def entry(name: str, rows: int) -> Entry:
    """Build a model of the zoo with a batch of `rows` rows, and a step that ends with the optimizer's step."""
    zoo = _zoo()
    torch.manual_seed(0)
    model, batch, step = zoo[name]()
    given = measure_size(batch, 0)
    batch = tree_map(lambda leaf: resized(leaf, 0, given, rows), batch)
    optimizer = torch.optim.AdamW(model.parameters())

    def whole(batch: Any) -> None:
        step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return model, batch, whole


def measure(name: str, rows: int, record: Path | None) -> dict[str, int]:
    """Measure the peaks of two steps on this machine's GPU."""
    model, batch, step = entry(name, rows)
    if record is not None:
        torch.cuda.memory._record_memory_history(stacks="python")
    model.cuda()
    batch = tree_map(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, batch)
    for _ in range(2):
        step(batch)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    peaks = {peak: int(stats[f"{peak}_bytes.all.peak"]) for peak in PEAKS}
    if record is not None:
        _keep(record, name, rows, peaks["allocated"])
    return peaks


def predict(name: str, rows: int, gpu: GpuSpec) -> dict[str, Any]:
    """Estimate the peaks of two steps on `gpu`, with the interval of the reserved peak."""
    model, batch, step = entry(name, rows)
    found = lowtide.estimate(model, step, batch, device=gpu)
    peaks = (found.peak_requested_bytes, found.peak_allocated_bytes, found.peak_reserved_bytes)
    return {**dict(zip(PEAKS, peaks, strict=True)), "interval": found.interval}


def compare(names: list[str], rows: int, record: Path | None) -> None:
    """Print a row for each model and setting, and the median and worst error of each peak."""
    properties = torch.cuda.get_device_properties(0)
    gpu = [properties.name, properties.total_memory, (properties.major, properties.minor)]
    print(f"{properties.name}, torch {torch.__version__}, {rows} rows a batch; error of what was estimated\n")
    print(
        f"{'model':12} {'segments':10}" + "".join(f" {peak:>14} {'error':>8}" for peak in PEAKS) + "  in the interval"
    )

    def both(row: tuple[str, str]) -> tuple[Any, Any]:
        name, text = row[0], SETTINGS[row[1]]
        options = ["--rows", str(rows), *(["--record", str(record)] if record and not text else [])]
        measured = _apart(["--measure", name, *options], {"PYTORCH_ALLOC_CONF": text})
        without = {"PYTORCH_ALLOC_CONF": text, "CUDA_VISIBLE_DEVICES": ""}
        return measured, _apart(["--predict", name, "--gpu", json.dumps(gpu), *options[:2]], without)

    errors: dict[str, list[float]] = {peak: [] for peak in PEAKS}
    asked = [(name, setting) for name in names for setting in SETTINGS]
    with ThreadPoolExecutor(max((os.cpu_count() or 1) - 2, 1)) as pool:  # each process counts its own memory only
        for (name, setting), (measured, estimated) in zip(asked, pool.map(both, asked), strict=True):
            if isinstance(measured, str) or isinstance(estimated, str):
                print(f"{name:12} {setting:10} {measured if isinstance(measured, str) else estimated}", flush=True)
                continue
            cells = ""
            for peak in PEAKS:
                error = estimated[peak] / measured[peak] - 1
                errors[peak].append(abs(error))
                cells += f" {measured[peak]:>14,} {error:>+8.2%}"
            low, high = estimated["interval"]
            print(f"{name:12} {setting:10}{cells}  {low <= measured['reserved'] <= high}", flush=True)
    for peak, found in errors.items():
        if found:
            print(f"{peak}: median {statistics.median(found):.2%}, worst {max(found):.2%}, of {len(found)}")


def _apart(arguments: list[str], environment: dict[str, str]) -> Any:
    """Run this file in a process of its own; return the JSON that it prints, or the last line of its error."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed without a word"])[-1][:150]
    return json.loads(done.stdout.splitlines()[-1])


def _keep(folder: Path, name: str, rows: int, peak_allocated: int) -> None:
    from snapshot_reduction import reduce_snapshot

    from lowtide.memory.snapshots.read import Snapshot

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        about = {"torch": torch.__version__, "workload": f"{name}, {rows} rows, two steps, AdamW"}
        reduced = reduce_snapshot(Snapshot.read(path), name=name, **about)
    reduced["expected"]["peak_allocated"] = peak_allocated  # a snapshot does not contain it
    (folder / f"{name.replace(' ', '_')}.json.gz").write_bytes(gzip.compress(json.dumps(reduced).encode(), mtime=0))


def _zoo() -> dict[str, Callable[[], Any]]:
    sys.path.insert(0, str(ZOO.parent))
    spec = importlib.util.spec_from_file_location("zoo", ZOO)
    assert spec is not None
    assert spec.loader is not None
    zoo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    return dict(zoo.ZOO)


def _names(wanted: list[str]) -> Iterator[str]:
    for name in wanted or _zoo():
        if name in LEFT_OUT:
            print(f"left out: {name}, which {LEFT_OUT[name]}")
        else:
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--predict", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.predict:
        name, total, capability = options.gpu
        gpu = GpuSpec(name=name, total_bytes=total, capability=tuple(capability), source="torch, on this machine")
        print(json.dumps(predict(options.predict, options.rows, gpu)))
        return
    if not torch.cuda.is_available():
        sys.exit("no GPU here, so there is nothing to compare with: run this where torch.cuda.is_available().")
    if options.measure:
        print(json.dumps(measure(options.measure, options.rows, options.record)))
    else:
        compare([*_names(options.names)], options.rows, options.record)


if __name__ == "__main__":
    main()
