"""Lowtide on models that are compiled as a whole, beside inductor's own budget: exact bytes, FLOPs, bits.

    python bench/compiled_whole.py                   # some 30 minutes on one core; writes docs/compiled_whole.md
    python bench/compiled_whole.py --models llama    # prints the rows of this model alone
    KERNELS=0 python bench/compiled_whole.py ...     # soon: leaves out inductor's kernels, and compares no bits

Each model is compiled by `torch.compile(model)` with inductor. Peaks are the CPU allocator's; FLOPs are those of the
matrix products, convolutions and attention that backward computes again, as torch counts them. Bits of the gradients
are compared with those of the compiled step without a budget. Lowtide is asked for each of the other way's peaks, and
for shares of the plain step's; a plan that is measured above its budget is planned anew, at most three times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from contest import tables
from contest.models import Contestant, contestant
from contest.step import Bits, Steps
from torch._functorch import config as functorch_config

import lowtide
from lowtide._torch.joint_graph import always_partitioned, partitioning_by
from lowtide.runtime.compiled_plan import Partitioner
from lowtide.runtime.fingerprint import static_bytes
from lowtide.runtime.joint_slots import JointSlots
from lowtide.units import format_bytes

HAS_KERNELS = os.environ.get("KERNELS", "1") != "0"
"""False to compile no kernels: those that write zeros allocate the same, so that peaks and FLOPs are the true ones."""
MODELS = ("gpt2", "gpt2-dropout", "llama", "bert", "vit", "resnet")
SHARES = (0.8, 0.5, 0.1)
"""Of saved bytes, as `activation_memory_budget` takes them."""
PERCENT = (50,)
"""Budgets of our own beside those: percent of the plain step's peak."""


@dataclass(frozen=True, slots=True)
class Row:
    """A step beside the plain one."""

    way: str
    peak_bytes: int
    flops: int
    """Computed again."""
    unequal: str
    """Which gradients have other bits."""
    what: str = ""

    def line(self, plain_bytes: int) -> str:
        """Of a table."""
        peak = f"{self.peak_bytes / 2**20:.2f} MiB | {self.peak_bytes / plain_bytes:.1%}"
        return f"| {self.way} | {peak} | {self.flops / 1e6:.0f} | {self.unequal} | {self.what} |"


def compiled(name: str) -> tuple[Steps, Contestant]:
    """A model that is compiled as a whole."""
    torch._dynamo.reset()
    made = contestant(name, quick=True)
    if name.startswith("gpt2"):  # else its first forward warns, which ends the graph
        made.model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    call: Any = torch.compile(made.model)
    return Steps(made.model, made.batch, call, has_plan=True), made


def measured(steps: Steps) -> tuple[int, Bits]:
    """Peak and bits of the step from the first state."""
    steps.seconds()
    static, _ = static_bytes(steps.model, steps.batch, ())
    steps.reset()
    with lowtide.measure(steps.model) as memory:
        steps.step(steps.batch)
    return static.total + memory.peak_bytes, steps.bits()


def by_torch(name: str, share: float) -> tuple[int, Bits, int]:
    """Peak, bits and FLOPs under inductor's own budget."""
    seen: list[JointSlots] = []
    partitioner = Partitioner()
    partitioner.seen = seen.append
    steps, _ = compiled(name)
    with functorch_config.patch(activation_memory_budget=share), always_partitioned(), partitioning_by(partitioner):
        peak_bytes, bits = measured(steps)
    again = sum(graph.joint.nodes[node].flops for graph in seen for node in graph.as_torch().again)
    return peak_bytes, bits, again


def rows(name: str) -> Iterator[Row]:
    """All ways on one model, the plain step first."""
    plain_bytes, bits, flops = by_torch(name, 1.0)
    yield Row("compiled as a whole", plain_bytes, flops, "")
    budgets: dict[str, int] = {}
    for share in SHARES:
        peak_bytes, found, flops = by_torch(name, share)
        yield Row(f"`activation_memory_budget` {share}", peak_bytes, flops, unequal(bits, found))
        budgets[f"{share}'s peak"] = peak_bytes
    budgets |= {f"{percent} %": plain_bytes * percent // 100 for percent in PERCENT}
    steps, _ = compiled(name)
    profile = lowtide.rehearse(steps.call, steps.step, steps.batch)
    for what, budget in budgets.items():
        yield _ours(steps, profile, what, budget, bits)


def _ours(steps: Steps, profile: lowtide.Profile, what: str, budget: int, bits: Bits) -> Row:
    way = f"**Lowtide, {what}**"
    try:
        fitted = lowtide.fit(steps.call, steps.step, steps.batch, budget=budget, profile=profile)
    except lowtide.LowtideError as error:
        return Row(way, budget, 0, "", f"refused: {str(error).splitlines()[0]}")
    with fitted:
        peak_bytes, found = measured(steps)
    apart = fitted.verdict.measured_peak_bytes / fitted.verdict.predicted_peak_bytes - 1
    told = f"budget {format_bytes(budget)}; measured {apart:+.1%} from the prediction"
    return Row(way, peak_bytes, fitted.plan.predicted.extra_flops, unequal(bits, found), told)


def leave_kernels_out() -> None:
    """Have inductor's kernels write zeros."""
    from torch._inductor.async_compile import AsyncCompile

    def without(_: AsyncCompile, types: list[str], code: str) -> Callable[..., None]:
        written = [at for at, kind in enumerate(types) if "*" in kind and "const" not in kind]

        def kernel(*args: Any) -> None:
            for at in written:
                args[at].zero_()

        return kernel

    AsyncCompile.cpp_pybinding = without


def unequal(one: Bits, other: Bits) -> str:
    """How many gradients have other bits, and how far the farthest is, relative to its norm."""
    if not HAS_KERNELS:
        return "not compared"
    apart = {name: (other.gradients[name] - found).norm() / found.norm() for name, found in one.gradients.items()}
    n = sum(not torch.equal(found, other.gradients[name]) for name, found in one.gradients.items())
    return "same" if not n else f"{n} of {len(apart)} differ, by up to {max(map(float, apart.values())):.0e}"


COLUMNS = ("| way | peak | of plain | MFLOP again | gradients | |", "|---|---:|---:|---:|---|---|")


def section(name: str) -> Iterator[str]:
    """Return the table of one model, line by line, as it is measured."""
    return tables.rows_of(contestant(name, quick=True).description, COLUMNS, rows(name))


if __name__ == "__main__":
    assert __doc__ is not None
    if not HAS_KERNELS:
        leave_kernels_out()
    tables.make("compiled_whole", "Models compiled as a whole", __doc__, MODELS, section)
