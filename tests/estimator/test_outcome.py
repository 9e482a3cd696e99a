"""Needs of a recorded run where the driver's addresses decide, and on GPUs of about that size."""

import random

from lowtide.estimator.cuda.gpu_estimate import Outcome
from lowtide.estimator.cuda.ops.op_registry import ScratchBlock
from lowtide.memory.allocator.config import AllocatorConfig
from lowtide.memory.events import Allocate, EventStream, Free
from lowtide.memory.gpu_specs import CONTEXT_BYTES, GpuSpec

MIB = 2**20


def stream(*changes: tuple[str, int]) -> EventStream:
    """Blocks by name: with a size in MiB where they begin, with 0 where they end."""
    sizes: dict[str, int] = {}
    events: list[Allocate | Free] = []
    for name, size in changes:
        if size:
            sizes[name] = size * MIB
            events.append(Allocate(ord(name), sizes[name], 0, "aten::empty"))
        else:
            events.append(Free(ord(name), sizes[name]))
    return EventStream(tuple(events), "cuda")


# c may go beside a, or into the segment that y has left. If it goes beside a there is no room for d.
TIE = stream(("A", 64), ("y", 32), ("A", 0), ("a", 32), ("y", 0), ("c", 32), ("a", 0), ("d", 64))


def gpu(n_bytes: int) -> GpuSpec:
    return GpuSpec(name="a GPU", total_bytes=n_bytes, capability=(8, 6), source="this test")


def outcome(bounds: dict[int, ScratchBlock] | None = None, config: AllocatorConfig | None = None) -> Outcome:
    return Outcome(TIE, bounds or {}, config or AllocatorConfig(), is_bounded=True)


def test_a_tie_is_decided_as_drivers_do_and_the_interval_has_the_other_way() -> None:
    needs, interval = outcome().needs()
    assert needs.peak_reserved_bytes == 96 * MIB  # segments descend: c goes into the later one
    assert interval == (96 * MIB, 160 * MIB)


def test_expandable_segments_have_no_ties() -> None:
    needs, interval = outcome(config=AllocatorConfig(expandable_segments=True)).needs()
    assert interval == (needs.peak_reserved_bytes,) * 2


def test_a_fit_that_depends_on_addresses_is_unknown() -> None:
    least, most = CONTEXT_BYTES
    verdicts = [outcome().on(gpu(n_bytes)) for n_bytes in (95 * MIB + least, 96 * MIB + most, 160 * MIB + most)]
    assert verdicts == ["does not fit", "unknown", "fits"]


def test_bounds_of_blocks_widen_the_interval() -> None:
    wide = outcome({ord("d"): ScratchBlock(64 * MIB, 0, 96 * MIB)})
    assert wide.needs()[1] == (96 * MIB, 192 * MIB)
    _, context = CONTEXT_BYTES
    # less than was reserved is enough, as what is cached can be given back; but not less than its segment and d
    assert [wide.on(gpu(n_bytes * MIB + context)) for n_bytes in (192, 160, 159)] == ["fits", "fits", "unknown"]


def test_a_share_of_the_memory_counts_as_all_of_it() -> None:
    big = gpu(2**30)
    assert outcome().on(big) == "fits"
    verdicts = [
        outcome(config=AllocatorConfig(per_process_memory_fraction=share * MIB / 2**30)).on(big) for share in (160, 95)
    ]
    assert verdicts == ["fits", "does not fit"]


def test_smaller_blocks_can_need_more_reserved_memory() -> None:
    """Best fit does not promise that less needs less: each bound is asked for by itself before anything fits."""
    draw = random.Random(35)  # the first of which it is so
    events: list[Allocate | Free] = []
    alive: list[tuple[int, int]] = []
    bounds: dict[int, ScratchBlock] = {}
    for block in range(60):
        if alive and draw.random() < 0.45:
            events.append(Free(*alive.pop(draw.randrange(len(alive)))))
            continue
        size = draw.choice([3, 7, 11, 12, 15, 21, 25, 33, 40]) * MIB
        events.append(Allocate(block, size, 0, "aten::empty"))
        alive.append((block, size))
        if draw.random() < 0.3:
            bounds[block] = ScratchBlock(size, size, size + draw.choice([1, 2, 4, 10]) * MIB)
    found = Outcome(EventStream(tuple(events), "cuda"), bounds, AllocatorConfig(), is_bounded=True)
    stream = found._streams["most"]
    most = max(found._simulate_unlimited(stream, order).peak_reserved_bytes for order in range(len(found._orders)))
    assert most < found.needs()[1][1]
    assert found.on(gpu(most + CONTEXT_BYTES[1])) == "unknown"
