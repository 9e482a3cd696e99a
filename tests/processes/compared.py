"""Run by the tests and by bench/sharded.py: estimates made in one process, beside four processes that take the steps.

Arguments: names of cases; none: all. Prints JSON: for the first and the last process of each case, the bytes at the
peak of a step as estimated where the other processes do not exist, as measured where gloo connects all four without
its copies, and as measured with them. Processes are forked from this one, which has imported torch.
"""

import gc
import itertools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once for all processes
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lowtide import absent_processes, estimate, measure
from lowtide._torch.tensors import find_parts, get_storage_id
from processes.uncopied import uncopied

N, RANKS, ROUNDS = 4, (0, 3), 4
WIDTH, INNER, TOKENS = 64, 256, 203
ROWS = 16

HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
CASES: dict[str, dict[str, Any]] = {
    "DDP": {"wrap": {}},
    "DDP, gradients are views of buckets": {"wrap": {"gradient_as_bucket_view": True}},
    "DDP, two micro-batches": {"wrap": {}, "n_parts": 2},
    "DDP, sent in float16": {"wrap": {}, "hook": fp16_compress_hook, "n_parts": 2},
    "FSDP2": {},
    "FSDP2, reshard_after_forward=True": {"settings": {"reshard_after_forward": True}},
    "FSDP2, reshard_after_forward=False": {"settings": {"reshard_after_forward": False}},
    "FSDP2, reshard_after_forward=2": {"settings": {"reshard_after_forward": 2}},
    "FSDP2, bfloat16, sums in float32": {"settings": HALF},
    "FSDP2, two micro-batches": {"n_parts": 2},
    "FSDP2, bfloat16, two micro-batches": {"settings": HALF, "n_parts": 2},
    "FSDP2, gradients clipped": {"clips": True},
    "FSDP2, blocks checkpointed": {"checkpointed": True},
    "FSDP2, from the meta device": {"on": "meta"},
    "FSDP2, parameters on the host": {"settings": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
    "HSDP 2 x 2": {"mesh": "hsdp"},
    "HSDP 2 x 2, bfloat16": {"mesh": "hsdp", "settings": HALF},
    "FSDP2, one row": {"n_rows": 1},
    "HSDP 2 x 2, one row": {"mesh": "hsdp", "n_rows": 1},
    "FSDP2, three micro-batches of one row": {"n_parts": 3, "n_rows": 3},
    "HSDP 2 x 2, bfloat16, scattered three times, summed once": {
        **{"mesh": "hsdp", "settings": HALF},
        **{"n_parts": 3, "n_rows": 3, "sums_late": True},
    },
    "tensor parallel": {"mesh": "tensor"},
    "tensor parallel 2 x FSDP2 2": {"mesh": "both"},
}


class Block(nn.Module):
    def __init__(self, width: int, inner: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + down

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return result


class Net(nn.Module):
    """A language model whose output is its loss."""

    def __init__(
        self,
        checkpointed: bool = False,
        width: int = WIDTH,
        inner: int = INNER,
        tokens: int = TOKENS,
        n_blocks: int = 3,
    ) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        self.blocks = nn.ModuleList(Block(width, inner, checkpointed) for _ in range(n_blocks))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def build(
    mesh: str = "",
    settings: Any = None,
    wrap: Any = None,
    checkpointed: bool = False,
    on: str = "cpu",
    hook: Any = None,
    **_: Any,
) -> Any:
    """Return a model, spread over the processes."""
    torch.manual_seed(0)
    with torch.device(on):
        model: Any = Net(checkpointed)
    if wrap is not None:
        model = DistributedDataParallel(model, **wrap)
        if hook is not None:
            model.register_comm_hook(None, hook)
        return model
    sizes = {"": (N,), "tensor": (N,)}.get(mesh, (2, N // 2))
    names = {"": None, "tensor": ("tensor",), "hsdp": ("replicate", "shard"), "both": ("data", "tensor")}[mesh]
    grid = distributed.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if mesh in ("tensor", "both"):
        for block in model.blocks:
            parallelize_module(block, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if mesh == "tensor":
        return model
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=grid["data"] if mesh == "both" else grid, **(settings or {}))
    if on == "meta":
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return model


def step_of(
    model: Any,
    optimizer: torch.optim.Optimizer,
    n_parts: int = 1,
    clips: bool = False,
    sums_late: bool = False,
    **_: Any,
) -> Callable[[Tensor], None]:
    """Return a step of `n_parts` micro-batches; `sums_late`: HSDP sums over replicas in the last, but scatters each."""
    is_wrapped = isinstance(model, DistributedDataParallel)

    def step(batch: Tensor) -> None:
        parts = batch.chunk(n_parts)
        for part in parts:
            sends = part is parts[-1]
            if sums_late:
                model.set_requires_all_reduce(sends)
            elif n_parts > 1 and not is_wrapped:
                model.set_requires_gradient_sync(sends)
            with model.no_sync() if is_wrapped and not sends else nullcontext():
                model(part).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def made(case: str) -> tuple[Any, torch.optim.Optimizer, Callable[[Tensor], None], Tensor]:
    model = build(**CASES[case])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(0, TOKENS, (CASES[case].get("n_rows", ROWS), 32))
    return model, optimizer, step_of(model, optimizer, **CASES[case]), batch


def estimated(case: str) -> int:
    model, optimizer, step, batch = made(case)
    result = estimate(model, step, batch, optimizer=optimizer)
    assert not result.unknown, (case, result.unknown)
    return result.peak_bytes


def measured(case: str) -> tuple[int, int]:
    """Return the bytes at the peak without and with gloo's copies.

    Each is the smallest of several peaks: threads of gloo hold what they have sent for a while, or not.
    """
    model, optimizer, step, batch = made(case)
    step(batch)
    step(batch)
    held = [*model.parameters(), batch, *(t for state in optimizer.state.values() for t in state.values())]
    parts = [part for tensor in held for part in find_parts(tensor)]
    n_static = sum({get_storage_id(part): part.untyped_storage().nbytes() for part in parts}.values())
    if isinstance(model, DistributedDataParallel):  # its buckets, which C++ holds, are as large as all gradients
        n_static += sum(p.nbytes for p in model.parameters())
    with uncopied():
        lean = min(itertools.islice(peaks(step, batch), ROUNDS))
    return n_static + lean, n_static + min(itertools.islice(peaks(step, batch), ROUNDS))


def peaks(step: Callable[[Tensor], None], batch: Tensor) -> Iterator[int]:
    while True:
        distributed.barrier()
        with measure() as memory:
            step(batch)
        yield memory.peak_bytes


def work(cases: list[str], rank: int, is_real: bool, meeting: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    if is_real:
        distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=N)
        return {case: measured(case) for case in cases}
    with absent_processes(N, rank):
        return {case: estimated(case) for case in cases}


def compare(cases: list[str]) -> Iterator[tuple[str, dict[int, tuple[int, int, int]]]]:
    """Yield each case with the estimated bytes, and those measured without and with gloo's copies, by rank."""
    gc.freeze()  # recordings begin with a look at all that is not frozen
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank, is_real in [*((rank, False) for rank in RANKS), *((rank, True) for rank in range(N))]:
            if (child := os.fork()) == 0:
                code = 1
                try:
                    found = work(cases, rank, is_real, f"{folder}/meeting")
                    Path(folder, f"{rank}-{is_real}").write_text(json.dumps(found), encoding="utf-8")
                    code = 0
                finally:
                    sys.excepthook(*sys.exc_info()) if code else None
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        while children:
            child, status = os.wait()
            children.remove(child)
            if os.waitstatus_to_exitcode(status):  # the others would wait for it
                for other in children:
                    os.kill(other, signal.SIGKILL)
                sys.exit("a process has failed")
        results = {
            (rank, is_real): json.loads(Path(folder, f"{rank}-{is_real}").read_text(encoding="utf-8"))
            for rank in RANKS
            for is_real in (False, True)
        }
    for case in cases:
        yield case, {rank: (results[rank, False][case], *results[rank, True][case]) for rank in RANKS}


if __name__ == "__main__":
    json.dump(dict(compare(sys.argv[1:] or [*CASES])), sys.stdout)
