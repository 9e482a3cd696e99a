"""Parts of a breakdown by `on_gpu.py --breakdown`: times of the GPU, of its host, and of each way to recompute.

Each part yields rows of (name, numbers). Parts that need a GPU are left out on a CPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from step_clocks import synchronize
from torch import Tensor

from lowtide._torch.device_timing import Stopwatch
from lowtide.profiler.slot_costs import slot_costs
from lowtide.runtime.bitmask import mask_of, pack_mask
from lowtide.runtime.recipes.masking import native_dropout
from lowtide.runtime.recipes.normalization import from_statistics
from lowtide.runtime.small_integers import FROM_OFFSETS, pack_indices
from lowtide.state.bitwise import identical

Row = tuple[str, dict[str, Any]]


def fastest(run: Callable[[], object], device: torch.device, runs: int = 10) -> tuple[float, float]:
    """Return the least milliseconds of `run` over several runs, on the host and on the device."""
    run()
    found = []
    for _ in range(runs):
        watch = Stopwatch(device)
        watch.start(ahead_ms=1.0)
        run()
        found.append(watch.stop())
    return min(times.host for times in found), min(times.device for times in found)


def rates(device: torch.device, tiny: bool) -> Iterator[Row]:
    """Yield rows with the rate of copies on the device, and the host's time for an operator."""
    source = torch.ones(2**20 if tiny else 2**30, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    _, ms = fastest(lambda: into.copy_(source), device)
    yield "copy", {"TB_per_s": 2 * source.nbytes / ms / 1e9}
    one = torch.zeros(4, device=device)
    synchronize(device)
    host_ms, device_ms = fastest(lambda: [one.add_(1) for _ in range(500)], device)
    yield "an operator on four elements", {"host_us": 2 * (host_ms or device_ms)}


def slots(device: torch.device, tiny: bool) -> Iterator[Row]:
    """Yield a row with the host's time for a saved tensor."""
    costs = slot_costs()
    yield "a saved tensor, beyond its operators", {"kept_us": 1e3 * costs.kept, "recomputed_us": 1e3 * costs.packed}


def recomputes(device: torch.device, tiny: bool) -> Iterator[Row]:
    """Yield rows with times of recomputes and packings; `equal` is True if the result has the bits of the original."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, width = (64, 96) if tiny else (16384, 768)

    def row(what: str, original: Tensor, **ways: Callable[[], Tensor]) -> Row:
        numbers: dict[str, Any] = {}
        for name, way in ways.items():
            host_ms, device_ms = fastest(way, device)
            numbers[name] = {
                "host_us": 1e3 * host_ms,
                "device_us": 1e3 * device_ms,
                "equal": identical(way(), original),
            }
        return what, numbers

    aten = torch.ops.aten
    shapes = [(4, 8, 14, 14)] if tiny else [(128, 64, 112, 112), (128, 256, 56, 56), (128, 1024, 14, 14)]
    for shape in shapes:
        x = (torch.randn(shape, device=device) + 0.3).to(dtype)
        weight, bias = torch.rand(shape[1], device=device) + 0.5, torch.randn(shape[1], device=device)
        normed, mean, invstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
        yield row(
            f"batch norm {list(shape)}",
            normed,
            first=lambda: aten.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)[0],  # noqa: B023
            saved_statistics=lambda: from_statistics(x, weight, bias, mean, invstd, 1e-5),  # noqa: B023
        )
        del x, normed
    x = torch.randn(rows, width, device=device).to(dtype)
    if device.type == "cuda":  # on a CPU, dropout multiplies by a drawn mask
        dropped, kept = aten.native_dropout(x, 0.1, True)
        yield row("dropout", dropped, first=lambda: native_dropout(x, kept, p=0.1, out_device=device))
    mask = torch.rand(rows, width, device=device) > 0.1
    bits = pack_mask(mask)
    yield row("mask to bits", bits["bits"], first=lambda: pack_mask(mask)["bits"])
    yield row("bits to mask", mask, first=lambda: mask_of(**bits))
    planes = torch.randn((4, 8, 28, 28) if tiny else (128, 64, 112, 112), device=device)
    indices = aten.max_pool2d_with_indices(planes, [3, 3], [2, 2], [1, 1])[1]
    offsets = pack_indices(indices)
    yield row("indices to offsets", offsets["bits"], first=lambda: pack_indices(indices)["bits"])
    yield row("offsets to indices", indices, first=lambda: FROM_OFFSETS.function(**offsets))


PARTS: dict[str, Callable[[torch.device, bool], Iterator[Row]]] = {
    "rates": rates,
    "slots": slots,
    "recomputes": recomputes,
}
