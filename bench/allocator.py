"""Errors in bytes, and speed, of the simulated caching allocator, compared with recordings of real allocators.

    python bench/allocator.py [FOLDER]

Each file of FOLDER (`*.json.gz`, by default the recordings of the tests) is replayed with the requests alone. Errors
are in bytes, simulated less recorded, and must be 0. "curve" counts the allocations after which the reserved bytes
differ, first with segments in the order of their recorded addresses, then in the order of their allocation. "events/s"
counts allocations and frees; it is the best of several calls of `replay` on one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from allocator_traces import Replayed, Trace, replay

RECORDINGS = Path(__file__).parents[1] / "tests" / "memory" / "data"
RUNS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=RECORDINGS)
    folder = parser.parse_args().folder
    paths = sorted(folder.glob("*.json.gz"))
    if not paths:
        print(f"no *.json.gz in {folder}")
        return 2
    head = ("recording", "events", "peak reserved", "error", "final", "allocated", "requested", "curve", "events/s")
    print("{:18} {:>7} {:>14} {:>6} {:>6} {:>10} {:>10} {:>11} {:>10}".format(*head))
    is_exact = True
    n_all, seconds_all = 0, 0.0
    for path in paths:
        trace = Trace.read(path)
        n_events = sum(event.kind in ("alloc", "free") for event in trace.events)
        seconds, found = _best(trace)
        errors = _errors(trace, found)
        invented = replay(trace, as_recorded=False)
        is_exact = is_exact and not any(errors) and not any(_errors(trace, invented))
        recorded = trace.compute_recorded_curve()
        wrong = [sum(a != b for a, b in zip(recorded, r.reserved_bytes, strict=True)) for r in (found, invented)]
        print(
            f"{trace.name:18} {n_events:7} {found.peak_reserved_bytes:14} {errors[0]:6} {errors[1]:6} {errors[2]:10} "
            f"{errors[3]:10} {wrong[0]:5} {wrong[1]:5} {n_events / seconds:10.0f}"
        )
        n_all += n_events
        seconds_all += seconds
    print(f"{'all':18} {n_all:7} {'':59} {n_all / seconds_all:10.0f}")
    print("0 bytes of error, with recorded and with invented addresses" if is_exact else "NOT exact")
    return 0 if is_exact else 1


def _best(trace: Trace) -> tuple[float, Replayed]:
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        found = replay(trace)
        seconds.append(time.perf_counter() - start)
    return min(seconds), found


def _errors(trace: Trace, found: Replayed) -> tuple[int, int, int, int]:
    return (
        found.peak_reserved_bytes - trace.expected["peak_reserved"],
        found.final_reserved_bytes - trace.expected["final_reserved"],
        found.peak_allocated_bytes - trace.expected["peak_allocated"],
        found.peak_requested_bytes - trace.expected["peak_requested"],
    )


if __name__ == "__main__":
    sys.exit(main())
