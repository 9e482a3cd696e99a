"""Cost of watching: the step time of the demo's GPT-2 with and without `lowtide.watch`, in turns.

    python bench/watch.py [--layers 6] [--batch-size 8] [--length 128] [--pairs 12]
    python bench/watch.py --tiny        # a loop of tiny steps: `watch` and `measure` against the plain loop

A pair is one step with the watch and one without, of the same model on the same batch; the ratio is the median over all
pairs. Times are CPU times of the process, so that a busy machine changes little. The first steps, which the watch
inspects closely, are listed separately.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import lowtide
from lowtide.cli.demo.workloads import workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="a loop of tiny steps instead")
    asked = parser.parse_args()
    if asked.tiny:
        tiny()
        return
    work = workload("gpt2", layers=asked.layers, batch_size=asked.batch_size, length=asked.length)

    def step(number: int) -> float:
        began = time.process_time()
        work.step(work.batches[number % len(work.batches)])
        return time.process_time() - began

    for number in range(2):
        step(number)
    watch = lowtide.watch(work.model)
    plain: list[float] = []
    watched: list[float] = []
    with watch:
        for number in range(asked.pairs + 5):
            watched.append(step(number))
            watch.pause()
            plain.append(step(number))
            watch.resume()
    close, steady = 5, slice(5, None)
    ratios = [w / p for w, p in zip(watched[steady], plain[steady], strict=True)]
    print(f"{work.description}, {torch.get_num_threads()} threads")
    print(f"plain step {1e3 * statistics.median(plain):.1f} ms")
    print(f"first {close} steps, looked at closely: {sum(watched[:close]) - sum(plain[:close]):+.2f} s in all")
    print(f"later steps: {statistics.median(ratios):.4f} of a plain step (median of {len(ratios)} pairs; at most 1.03)")
    print(watch)


def tiny(n_steps: int = 300, rounds: int = 3) -> None:
    """Compare loops of tiny steps: plain, watched, and measured as a whole."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(4, 16), torch.randn(4, 1)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    def plain() -> None:
        for _ in range(n_steps):
            step()

    def watched() -> None:
        with lowtide.watch(model):
            plain()

    def measured() -> None:
        with lowtide.measure(model, optimizer):
            plain()

    def seconds(loop: Callable[[], None]) -> float:
        began = time.process_time()
        loop()
        return time.process_time() - began

    plain()
    times = [(seconds(plain), seconds(watched), seconds(measured)) for _ in range(rounds)]
    print(f"plain step {1e6 * statistics.median(t[0] for t in times) / n_steps:.0f} us")
    print(f"watched: {statistics.median(t[1] / t[0] for t in times):.2f} times the plain step (at most 4)")
    print(f"measured: {statistics.median(t[2] / t[0] for t in times):.2f} times the plain step (at most 10)")


if __name__ == "__main__":
    main()
