"""Steps of one of several processes: estimates beside what the process itself allocates, and GPUs that are not there.

The other processes are not there: collectives end at once, and all memory is as it is in a real training.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide._torch.tensors import find_parts, get_storage_id
from lowtide.estimator.absent_processes import AbsentProcesses
from lowtide.estimator.cuda.process_groups import replacements
from lowtide.memory.allocator.simulation import simulate
from lowtide.memory.events import Allocate, EventStream, Free
from lowtide.memory.gpu_specs import parse_gpus
from lowtide.memory.nccl_memory import REPORTS, nccl_bytes
from processes.compared import Net

WIDTH, TOKENS, INNER = 32, 101, 127
Step = Callable[[Tensor], None]


def net(checkpointed: bool = False) -> Net:
    return Net(checkpointed, WIDTH, INNER, TOKENS, n_blocks=2)


def sharded(n: int, hsdp: bool = False, checkpointed: bool = False, on: str = "cpu", **settings: Any) -> Any:
    torch.manual_seed(0)
    with torch.device(on):
        model = net(checkpointed)
    sizes, names = ((2, n // 2), ("replicate", "shard")) if hsdp else ((n,), None)
    mesh = distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, **settings)
    return model


def step_of(model: Any, optimizer: torch.optim.Optimizer, n_parts: int = 1) -> Step:
    def step(batch: Tensor) -> None:
        parts = batch.chunk(n_parts)
        for part in parts:
            if n_parts > 1:
                model.set_requires_gradient_sync(part is parts[-1])
            model(part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("rank", "settings", "n_parts"),
    [
        pytest.param(0, {}, 1, id="first"),
        pytest.param(3, {"mp_policy": HALF}, 2, id="last, half precision, micro-batches"),
        pytest.param(0, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 1, id="on the host"),
        pytest.param(3, {}, 1, id="last", marks=pytest.mark.slow),
        pytest.param(0, {"reshard_after_forward": False}, 1, id="stays whole", marks=pytest.mark.slow),
        pytest.param(0, {"reshard_after_forward": 2}, 1, id="half whole", marks=pytest.mark.slow),
        pytest.param(0, {"reshard_after_forward": True}, 1, id="root too", marks=pytest.mark.slow),
        pytest.param(0, {"hsdp": True}, 1, id="hsdp", marks=pytest.mark.slow),
        pytest.param(0, {"hsdp": True, "mp_policy": HALF}, 1, id="hsdp, half precision", marks=pytest.mark.slow),
        pytest.param(0, {"checkpointed": True}, 1, id="checkpoints", marks=pytest.mark.slow),
    ],
)
def test_an_estimate_is_what_the_process_allocates(rank: int, settings: dict[str, Any], n_parts: int) -> None:
    with lowtide.absent_processes(4, rank):
        model = sharded(4, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step, batch = step_of(model, optimizer, n_parts), torch.randint(0, TOKENS, (8, 16))
        estimate = lowtide.estimate(model, step, batch, optimizer=optimizer)
        step(batch)
        step(batch)
        held = [*model.parameters(), batch, *(t for state in optimizer.state.values() for t in state.values())]
        parts = [part for tensor in held for part in find_parts(tensor)]
        static_bytes = sum({get_storage_id(part): part.untyped_storage().nbytes() for part in parts}.values())
        with lowtide.measure() as memory:
            step(batch)
    assert estimate.peak_bytes == static_bytes + memory.peak_bytes
    assert not estimate.unknown
    assert estimate.static.total == static_bytes


def test_small_tensors_are_known_and_not_sent() -> None:
    """Known contents are no reason to run a collective on them: its result is a wrapper without memory."""
    with lowtide.absent_processes(2):
        mesh = distributed.init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

        def step(batch: Tensor) -> None:
            (batch + model(batch)).square().mean().backward()

        batch = torch.randn(8, WIDTH)
        assert lowtide.estimate(model, step, batch).peak_bytes > batch.nbytes


@pytest.mark.parametrize("foreach", [True, False])
def test_plain_and_parallel_parameters_in_one_foreach_update_fail_as_in_torch(foreach: bool) -> None:
    """Foreach operators refuse to mix them: an estimate that succeeds would be of a step that can't run."""
    with lowtide.absent_processes(2):
        mesh = distributed.init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.LayerNorm(WIDTH))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

        def step(batch: Tensor) -> None:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        batch = torch.randn(8, WIDTH)
        if foreach:
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                lowtide.estimate(model, step, batch)
        else:
            assert lowtide.estimate(model, step, batch).static.optimizer > 0


def test_a_gpu_of_eight_holds_an_eighth() -> None:
    """Parameters on the meta device are enough. Rows are split evenly up to one, and the first part is never less."""
    found = []
    for n in (2, 8):
        with lowtide.absent_processes(n):
            model = sharded(n, on="meta")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            batch = torch.randint(0, TOKENS, (8, 16))
            found.append(
                lowtide.estimate(model, step_of(model, optimizer), batch, device=f"{n} x h100-80", optimizer=optimizer)
            )
            rows = [(-(-len(p) // n), p[0].numel()) for p in net().parameters()]
            own = 4 * sum(n_rows * n_columns for n_rows, n_columns in rows)
            assert found[-1].static.parameters == own
            assert found[-1].static.optimizer == 2 * own
    two, eight = found
    assert eight.processes is not None
    assert (eight.processes.size, eight.processes.rank) == (8, 0)
    assert eight.peak_requested_bytes < two.peak_requested_bytes
    groups = eight.timeline.alive_at_peak()
    assert "communication buffers" in groups or "gathered parameters" in groups
    assert eight.nccl == nccl_bytes(1)
    assert eight.fits
    assert not eight.is_sure, "NCCL's memory is only reported"
    assert "on each of 8 x H100-80, rank 0" in str(eight)
    assert "NCCL" in str(eight)
    assert len(set(eight.whole.streams.values())) == 2, "all-gathers and reduce-scatters have streams of their own"


def test_a_padded_part_takes_its_memory_once() -> None:
    """Of an odd number of rows the second of two processes has one less, and as much memory."""
    requested = []
    for rank in range(2):
        with lowtide.absent_processes(2, rank):
            model = sharded(2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            batch = torch.randint(0, TOKENS, (8, 16))
            estimate = lowtide.estimate(
                model, step_of(model, optimizer), batch, device="2 x h100-80", optimizer=optimizer
            )
            requested.append(estimate.peak_requested_bytes)
    assert requested[0] - requested[1] in range(4 * WIDTH * 4)


def test_parts_that_stay_until_backward_are_gathered_parameters() -> None:
    """With `reshard_after_forward=2`, a process keeps a half of each parameter, padded to whole rows on each of 4."""
    with lowtide.absent_processes(4):
        model = sharded(4, reshard_after_forward=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        batch = torch.randint(0, TOKENS, (8, 16))
        timeline = lowtide.estimate(model, step_of(model, optimizer), batch, optimizer=optimizer).timeline
    forward = next(phase for phase in timeline.phases if phase.name == "forward")
    alive = Counter(b.bytes for b in timeline.alive_at(forward.stop - 1) if b.category == "gathered parameters")
    halves = Counter(-(-len(p) // 4) * 2 * p[0].numel() * 4 for p in net().blocks.parameters())
    assert halves <= alive


def test_ddp_never_misses_its_buckets() -> None:
    """Besides a process alone, each has its gradients twice."""
    batch = torch.randint(0, TOKENS, (8, 16))
    peaks = {}
    for n in (1, 2):
        with lowtide.absent_processes(n):
            model = DistributedDataParallel(net()) if n > 1 else net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            device = f"{n} x h100-80" if n > 1 else "h100-80"
            estimate = lowtide.estimate(model, step_of(model, optimizer), batch, device=device, optimizer=optimizer)
            peaks[n] = estimate.peak_bytes
    gradients = sum(p.nbytes for p in net().parameters())
    assert peaks[2] - peaks[1] >= gradients


def test_a_communication_hook_of_torch_sends_a_copy_of_the_bucket_and_another_is_unknown() -> None:
    def own(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("an estimate calls no hook")

    peaks, unknown = {}, {}
    for hook in (None, fp16_compress_hook, own):
        with lowtide.absent_processes(2):
            model = DistributedDataParallel(nn.Linear(64, 64))
            if hook is not None:
                model.register_comm_hook(None, hook)

            def step(batch: Tensor, model: nn.Module = model) -> None:
                model(batch).sum().backward()
                model.zero_grad()

            estimate = lowtide.estimate(model, step, torch.ones(1, 64), device="2 x h100-80")
            peaks[hook], unknown[hook] = estimate.peak_bytes, estimate.unknown
    assert peaks[fp16_compress_hook] - peaks[None] == 2 * (64 * 64 + 64)
    assert unknown[fp16_compress_hook] == unknown[None]
    assert any("own, which sends gradients" in line for line in unknown[own])


def test_memory_of_one_stream_is_not_given_to_another() -> None:
    events = (Allocate(0, 2**21, 0, ""), Free(0, 2**21), Allocate(1, 2**21, 0, ""), Free(1, 2**21))
    one, two = EventStream(events), EventStream(events, streams={1: 5})
    assert simulate(one).peak_reserved_bytes * 2 == simulate(two).peak_reserved_bytes
    assert EventStream.from_json(two.to_json()) == two


def test_gpus_are_named_with_their_number() -> None:
    gpu, n = parse_gpus("8 x h100-80")
    assert (gpu.name, n) == ("H100-80", 8)
    assert parse_gpus("RTX 4090")[1] is None
    with pytest.raises(lowtide.LowtideError, match="less than one GPU"):
        parse_gpus("0 x h100-80")


def test_more_gpus_than_processes_are_refused() -> None:
    model = net()
    step = step_of(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(lowtide.RehearsalError, match="absent_processes\\(8\\)"):
        lowtide.estimate(model, step, torch.zeros(8, 16, dtype=torch.int64), device="8 x h100-80")
    with (
        lowtide.absent_processes(2),
        pytest.raises(lowtide.RehearsalError, match="already"),
        lowtide.absent_processes(2),
    ):
        pass


def test_a_replicated_module_is_refused() -> None:
    with lowtide.absent_processes(2):
        model = replicate(nn.Linear(4, 4))
        with pytest.raises(lowtide.RehearsalError, match="DistributedDataParallel instead"):
            lowtide.estimate(model, lambda batch: model(batch).sum().backward(), torch.ones(2, 4))


def test_sends_between_two_processes_are_refused() -> None:
    found = {(owner, name): function for owner, name, function in replacements(AbsentProcesses(size=2))}
    for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv"):
        with pytest.raises(lowtide.RehearsalError, match=f"{name} sends from one process to another"):
            found[distributed, name]()
    with pytest.raises(lowtide.RehearsalError, match="FSDP1"):
        found[FullyShardedDataParallel, "__init__"](None)


def test_the_memory_of_nccl_lies_within_the_reports() -> None:
    reported = [report.n_bytes for report in REPORTS]
    assert nccl_bytes(1)[0] == min(reported)
    assert nccl_bytes(3)[1] <= max(reported) <= nccl_bytes(4)[1]
    assert nccl_bytes(0) == (0, 0)


def test_the_largest_batch_of_one_of_several_processes_leaves_room_for_nccl() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    gpu, _ = parse_gpus("cuda:3GiB")

    def step(x: Tensor) -> None:
        model(x).square().mean().backward()

    def largest() -> lowtide.LargestBatch:
        return lowtide.largest_batch(model, step, torch.ones(4, 64), device=gpu, most=8)

    alone = largest().budget_bytes
    with lowtide.absent_processes(2):
        assert largest().budget_bytes == alone - nccl_bytes(1)[1]
