"""`lowtide estimate --device "N x GPU"`: scripts for torchrun, without the GPUs and the other processes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import lowtide
from conftest import RunPython
from lowtide import cli
from lowtide.cli.several_gpus import compared, find_other_generation, table, with_gpus
from lowtide.memory.gpu_specs import GPUS, parse_gpu

HEAD = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("nccl")
rank, world = distributed.get_rank(), distributed.get_world_size()
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
mesh = distributed.init_device_mesh("cuda", (world,))
"""

MLP = """
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
"""

STEPS = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(8, 64, device=device)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

Estimate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def estimate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Estimate:
    def command(text: str, *options: str, gpus: str = "2 x h100-80") -> tuple[int, str, str]:
        script = tmp_path / "train.py"
        script.write_text(HEAD + text, encoding="utf-8")
        capfd.readouterr()
        code = cli.main(("estimate", "--device", gpus, *options, str(script)))
        return code, *capfd.readouterr()

    return command


FSDP1 = (
    MLP
    + """
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(model)
"""
    + STEPS
)

PIPELINE = (
    MLP
    + """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
stage = PipelineStage(model, rank, world, device)
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
x = torch.randn(8, 64, device=device)
schedule.step(x, target=x)
"""
)

CONTEXT_PARALLEL = """
from torch.distributed.tensor.experimental import context_parallel

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

model = Attention().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    x = torch.randn(2, 32, 64, device=device)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SYMMETRIC_MEMORY = (
    MLP
    + """
fully_shard(model, mesh=mesh)
model.set_symm_mem_for_comm()
"""
    + STEPS
)

ROUTED_TOKENS = (
    """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(64, world), nn.Linear(64, 64)

    def forward(self, x):
        sent = torch.bincount(self.router(x).argmax(-1), minlength=world)
        received = torch.zeros_like(sent)
        distributed.all_to_all_single(received, sent)
        tokens = torch.empty(int(received.sum()), 64, device=x.device)
        distributed.all_to_all_single(tokens, x.detach(), received.tolist(), sent.tolist())
        return self.expert(tokens)

model = Experts().to(device)
"""
    + STEPS
)

GATHERED_SIZES = (
    """
class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        length = torch.tensor([len(x)], device=x.device)
        lengths = [torch.zeros_like(length) for _ in range(world)]
        distributed.all_gather(lengths, length)
        longest = int(torch.cat(lengths).max())
        return self.linear(nn.functional.pad(x, (0, 0, 0, longest - len(x))))

model = Padded().to(device)
"""
    + STEPS
)

USER_STREAM = (
    """
class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.stream = nn.Linear(64, 64), torch.cuda.Stream()

    def forward(self, x):
        with torch.cuda.stream(self.stream):
            return self.linear(x)

model = Aside().to(device)
fully_shard(model, mesh=mesh)
"""
    + STEPS
)

SEND = (
    MLP
    + """
if rank == 0:
    distributed.send(torch.ones(4, device=device), 1)
"""
    + STEPS
)

SEND_IN_BATCHES = (
    MLP
    + """
received = torch.empty(4, device=device)
operations = [
    distributed.P2POp(distributed.isend, torch.ones(4, device=device), (rank + 1) % world),
    distributed.P2POp(distributed.irecv, received, (rank - 1) % world),
]
for work in distributed.batch_isend_irecv(operations):
    work.wait()
"""
    + STEPS
)

FUNCTIONAL = "import torch.distributed._functional_collectives as functional\n"

ROUTED_BY_LISTS = (
    FUNCTIONAL
    + """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(64, world), nn.Linear(64, 64)

    def forward(self, x):
        sent = torch.bincount(self.router(x).argmax(-1), minlength=world)
        received = functional.all_to_all_single(sent, None, None, distributed.group.WORLD)
        sizes = received.tolist(), sent.tolist()
        return self.expert(functional.all_to_all_single_autograd(x, *sizes, distributed.group.WORLD))

model = Experts().to(device)
"""
    + STEPS
)

RECEIVED_BEFORE = (
    FUNCTIONAL
    + MLP
    + STEPS.replace(
        "    loss =",
        """
    lengths = functional.all_to_all_single(torch.tensor([len(x)] * world), None, None, distributed.group.WORLD)
    x = nn.functional.pad(x, (0, 0, 0, int(lengths.max()) - len(x)))
    loss =""",
    )
)

COMPILED_SUM = (
    MLP
    + """
plain = model

@torch.compile
def model(x):
    out = plain(x)
    distributed.all_reduce(out)
    return out
"""
    + STEPS.replace("model.parameters()", "plain.parameters()")
)

COMPILED_COLLECTIVES = (
    MLP
    + """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
model = torch.compile(model)
"""
    + STEPS
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(FSDP1, "FSDP1.* is not estimated", id="FSDP1"),
        pytest.param(PIPELINE, "sends from one process to another, as pipelines", id="pipeline"),
        pytest.param(CONTEXT_PARALLEL, "context parallel passes keys and values", id="context parallel"),
        pytest.param(SYMMETRIC_MEMORY, "gathers in symmetric memory", id="symmetric memory"),
        pytest.param(ROUTED_TOKENS, "know what other processes send", id="tokens sent to experts"),
        pytest.param(GATHERED_SIZES, "know what other processes send", id="padded to the longest of all"),
        pytest.param(USER_STREAM, "CUDA stream of its own", id="a stream of the script's"),
        pytest.param(SEND, "torch.distributed.send sends from one process to another", id="send"),
        pytest.param(SEND_IN_BATCHES, "batch_isend_irecv sends from one process to another", id="sends in batches"),
        pytest.param(ROUTED_BY_LISTS, "know what other processes send", id="tokens sent by lists of sizes"),
        pytest.param(RECEIVED_BEFORE, "know what other processes send", id="received before the first forward"),
        pytest.param(COMPILED_COLLECTIVES, "compiled code", id="compiled collectives"),
        pytest.param(COMPILED_SUM, r"\(all_reduce\) runs in compiled code, model", id="a sum in a compiled function"),
    ],
)
def test_parallel_work_that_is_not_estimated_is_refused_in_words(text: str, reason: str, estimate: Estimate) -> None:
    code, out, err = estimate(text, "--rank", "0")
    assert code == 2, (out, err)
    assert re.search(reason, err), err
    assert "Traceback" not in err
    assert not out


def test_a_script_that_takes_one_step_has_its_process_group(estimate: Estimate) -> None:
    wrapped = "model = nn.parallel.DistributedDataParallel(model)\n"
    one_step = STEPS.replace("range(3)", "range(1)") + "distributed.destroy_process_group()\n"
    code, out, err = estimate(MLP + wrapped + one_step, "--rank", "0")
    assert code == 0, err
    assert "requested at the peak of the script's only step" in out
    assert "NCCL, which is not the allocator's, by public reports" in out
    assert "0 B to 0 B  NCCL" not in out
    assert "has started no process group" not in out
    assert "the script takes one step" in out


@pytest.mark.slow
def test_an_error_of_the_first_process_is_written_once_and_last(estimate: Estimate) -> None:
    code, out, err = estimate(FSDP1)
    assert code == 2
    assert not out
    assert err.count("(FSDP1), which is not estimated") == 1
    assert err.endswith("Shard it with torch.distributed.fsdp.fully_shard (FSDP2).\n")


SENT_BY_THE_FIRST = (
    """
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

name, given = [f"run of {world}" if rank == 0 else None], [None]
distributed.broadcast_object_list(name, src=0)
distributed.scatter_object_list(given, [64] * world if rank == 0 else None, src=0)
assert rank > 0 or (name, given) == (["run of 2"], [64])
weights = nn.Linear(64, 64).state_dict() if rank == 0 else {}
with torch.device("meta"):
    model = nn.Linear(64, 64)
fully_shard(model, mesh=mesh)
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, weights, options=options)
"""
    + STEPS
)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_the_first_process_sends_is_made_up_in_the_last(rank: str, estimate: Estimate) -> None:
    code, out, err = estimate(SENT_BY_THE_FIRST, "--rank", rank)
    assert code == 0, err
    noted = re.findall(r"train\.py:(\d+): what other processes send \(torch\.distributed\.(\w+)\)", out)
    assert [name for _, name in noted] == ["broadcast_object_list", "scatter_object_list"] * (rank == "1"), out
    assert re.search(r"^  parameters +8.12 KiB  there before$", out, re.MULTILINE), out


def test_a_size_that_all_processes_agree_on_is_noted_as_this_ones(estimate: Estimate) -> None:
    agreed = """
    length = torch.tensor([len(x)], device=device)
    distributed.all_reduce(length, op=distributed.ReduceOp.MAX)
    x = nn.functional.pad(x, (0, 0, 0, length.item() - len(x)))
    loss ="""
    code, out, err = estimate(MLP + STEPS.replace("    loss =", agreed), "--rank", "0")
    assert code == 0, err
    assert re.search(r"train\.py:\d+: what .* \(torch\.distributed\.all_reduce\) is this process's own", out), out


@pytest.mark.parametrize("gathers", ["all_gather_object(lengths, len(x))", "gather_object(len(x), lengths)"])
def test_sizes_that_are_gathered_as_objects_are_noted_as_this_ones(gathers: str, estimate: Estimate) -> None:
    agreed = f"""
    lengths = [None] * world
    distributed.{gathers}
    x = nn.functional.pad(x, (0, 0, 0, max(lengths) - len(x)))
    loss ="""
    code, out, err = estimate(MLP + STEPS.replace("    loss =", agreed), "--rank", "0")
    assert code == 0, err
    name = gathers.partition("(")[0]
    noted = rf"train\.py:\d+: what other processes send \(torch\.distributed\.{name}\) is taken as this process's own"
    assert len(re.findall(noted, out)) == 1, out


FROZEN = (
    """
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).to(device)
model[0].requires_grad_(False)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
"""
    + STEPS
)


def test_units_without_a_backward_are_estimated(estimate: Estimate) -> None:
    """FSDP2 gathers a frozen unit ahead of a backward that never comes, and waits for it at the end of the step."""
    code, out, err = estimate(FROZEN, "--rank", "0")
    assert code == 0, err
    assert "it fits" in out


KEPT_GATHERED = """
model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)]).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for number in range(8):
    is_last = number % 4 == 3
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_step_ends_at_its_optimizer_where_parameters_stay_gathered_over_micro_batches(estimate: Estimate) -> None:
    code, out, err = estimate(KEPT_GATHERED, "--rank", "0")
    assert code == 0, err
    shard_kib = 3 * 64 * 64 * 4 // 2 // 2**10
    assert re.search(rf"^  parameters +{shard_kib} KiB ", out, re.MULTILINE), out
    assert re.search(rf"^  optimizer state +{2 * shard_kib} KiB ", out, re.MULTILINE), out
    assert "no torch.optim.Optimizer" not in out


LARGE = """
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(32)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device=device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(16, 4096, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
"""2 GiB of parameters, as much of gradients, and twice as much of the optimizer's state."""


@pytest.mark.slow  # four processes
def test_the_number_of_gpus_that_is_enough(estimate: Estimate, tmp_path: Path) -> None:
    """One of 8 GB is too small, two are enough, and more are not tried."""
    code, out, err = estimate(LARGE, "--fewest", "--json", str(tmp_path / "out.json"), gpus="2 x rtx 3070")
    assert code == 0, err
    assert err.count("written") == 1
    by_way = json.loads((tmp_path / "out.json").read_text())[0]["by_number"]
    assert by_way.keys() == {"plain", "recomputed", "replayed"}
    assert "as a plan may:" in out
    one, two = (row for row in by_way["plain"] if row["gpu"] == "RTX 3070")
    assert (one["n_gpus"], two["n_gpus"]) == (1, 2)
    # half of parameters, gradients, the optimizer's two states and the update's temporaries
    assert one["peak_requested_bytes"] - two["peak_requested_bytes"] == 5 * 2**30
    assert two["smallest_gpu"] == "RTX 3070"
    assert two["enough_of"][0] == "RTX 3070"
    assert one["smallest_gpu"] == one["enough_of"][0] != "RTX 3070"
    assert not {*one["enough_of"]} & {*two["enough_of"]}
    assert re.search(rf"^   1 .* reserved on each: {one['smallest_gpu']}, .*B200-180$", out, re.MULTILINE)
    assert re.search(r"^   2 .* reserved on each: RTX 3070", out, re.MULTILINE)
    older = [row for row in by_way["plain"] if row["gpu"] == "V100-32"]
    assert [row["n_gpus"] for row in older] == [1, 2]
    assert older[0]["enough_of"][0] == older[0]["smallest_gpu"] == "RTX 2080 Ti"
    assert older[1]["enough_of"] == []  # one is enough of each
    assert re.search(r"^   1 .* reserved on each: RTX 2080 Ti", out, re.MULTILINE)


def needs(n_gpus: int, smallest: str | None, gpu: str = "H100-80") -> dict[str, object]:
    return {"gpu": gpu, "n_gpus": n_gpus, "peak_reserved_bytes": 2**34 // n_gpus, "smallest_gpu": smallest}


NORM_LAST = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleDict({str(n): Block() for n in range(4)}), nn.Linear(64, 64)

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)

model = Model().to(device)
for block in model.blocks.values():
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
"""


def test_plans_without_a_rehearsal_recompute_where_parameters_are_gathered(estimate: Estimate, tmp_path: Path) -> None:
    """A block ends with a norm, whose result the next block saves, and whose weight is not gathered there."""
    peaks, flops = [], []
    steps = STEPS.replace("(8, 64", "(512, 64")
    for how in ("plain", "recomputed", "replayed"):
        options = ("--how", how, "--rank", "0", "--record", str(tmp_path / how))
        code, _, err = estimate(NORM_LAST + steps, *options)
        assert code == 0, err
        record = json.loads((tmp_path / how).read_text(encoding="utf-8"))[0]
        peaks.append(record["peak_requested_bytes"])
        flops.append(record["flops"])
        assert record["at_peak_bytes"]["gathered parameters"] > 0
        assert sum(record["at_peak_bytes"].values()) == max(phase["peak_bytes"] for phase in record["phases"])
    gelu = 512 * 256 * 4
    assert peaks[0] - peaks[1] >= 3 * gelu, "of the last block, backward holds the result of GELU"
    assert peaks[1] > peaks[2]
    assert flops[0] == flops[1] < flops[2]


TENSOR_PARALLEL = (
    MLP
    + """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
model = nn.Sequential(model, nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device))
for block in model:
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
"""
    + STEPS
)


def test_blocks_that_send_are_not_replayed(estimate: Estimate, tmp_path: Path) -> None:
    flops = []
    for how in ("plain", "replayed"):
        code, _, err = estimate(TENSOR_PARALLEL, "--how", how, "--rank", "0", "--record", str(tmp_path / how))
        assert code == 0, err
        flops.append(json.loads((tmp_path / how).read_text(encoding="utf-8"))[0]["flops"])
    assert flops[0] == flops[1]


@pytest.mark.parametrize("others", [(), ("--device", "2 x h100-80", "--fewest")])
def test_plans_of_an_estimate_need_one_gpu_and_one_answer(others: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert cli.main(("estimate", "--how", "replayed", *others, str(tmp_path / "train.py"))) == 2


@pytest.mark.parametrize(
    ("smallest", "verdict", "text"),
    [
        ("large", "fits", "smallest GPU: large"),
        (None, "does not fit", "answer: does not fit; smallest GPU: none that is known"),
    ],
)
def test_a_larger_last_process_is_answered_for(smallest: str | None, verdict: str, text: str) -> None:
    def record(rank: int, gib: int, smallest: str | None, verdict: str) -> dict[str, object]:
        peaks = {f"peak_{kind}_bytes": gib * 2**30 for kind in ("requested", "allocated", "reserved")}
        return {"rank": rank, "smallest_gpu": smallest, "verdict": verdict, **peaks}

    first = record(0, 8, "small", "fits")
    peaks = "rank 3: 24 GiB requested, 24 GiB allocated, 24 GiB reserved"
    assert compared(first, record(3, 24, smallest, verdict)) == f"{peaks}; {text}"
    assert compared(first, record(3, 8, "small", "fits")) == "rank 3: the same"


def test_the_last_process_is_compared_with_the_budget_of_a_plan() -> None:
    kinds = ("requested", "allocated", "reserved")
    shared = {"smallest_gpu": "small", "verdict": "fits"}
    first, last = (
        {**{f"peak_{kind}_bytes": gib * 2**30 for kind in kinds}, "rank": rank, **shared}
        for rank, gib in ((0, 7), (3, 9))
    )
    under = {"plan": {"peak_bytes": 9 * 2**30, "budget_bytes": 8 * 2**30, "predicted_bytes": 7 * 2**30}}
    peaks = "rank 3: 9 GiB requested, 9 GiB allocated, 9 GiB reserved"
    text = compared({**first, **under}, {**last, **under})
    assert text == f"{peaks}; under the plan: 9 GiB is above its budget of 8 GiB"


LARGER_LAST = MLP + STEPS.replace("(8, 64", "(8 if rank + 1 < world else 2**19, 64")
"""The last of several processes has a batch of 128 MiB."""


@pytest.mark.slow
def test_the_number_of_gpus_that_is_enough_for_the_larger_process(estimate: Estimate, tmp_path: Path) -> None:
    code, _, err = estimate(LARGER_LAST, "--fewest", "--json", str(tmp_path / "out.json"))
    assert code == 0, err
    first, last = json.loads((tmp_path / "out.json").read_text())
    two = next(row for row in first["by_number"]["plain"] if row["n_gpus"] == 2)
    assert two["peak_requested_bytes"] == last["peak_requested_bytes"] > 2**27 > first["peak_requested_bytes"]


def test_each_generation_of_kernels_is_tried_on_its_largest_gpu() -> None:
    assert {find_other_generation(parse_gpu(device)).name for device in ("h100-80", "cuda:24GiB")} == {"V100-32"}
    assert find_other_generation(parse_gpu("t4")).name == "B200-180"


def test_each_gpu_is_listed_at_the_smallest_number_that_is_enough() -> None:
    given, others = parse_gpu("h100-80"), [gpu.name for gpu in GPUS if gpu.capability and gpu.capability < (8, 0)]
    newer = [gpu.name for gpu in GPUS if not gpu.shared and gpu.name not in others]
    needed = (needs(1, None), needs(2, "A100-80"), needs(4, "A100-80"), needs(8, "RTX 3080"))
    rows = with_gpus(needed, newer)
    assert [row["enough_of"] for row in rows] == [[], newer[-4:], [], newer[newer.index("RTX 3080") : -4]]
    older = with_gpus([needs(1, None, "V100-32"), needs(4, "V100-16", "V100-32")], others)
    assert table([*rows, *older], given).splitlines() == [
        "enough GPUs of each kind, by the number of GPUs that was tried:",
        "   1     16 GiB reserved on each: -",
        "   2      8 GiB reserved on each: A100-80, H100-80, H200-141, B200-180",
        "   4      4 GiB reserved on each: -",
        "   4      4 GiB reserved on each: V100-16, P100-16, V100-32",
        f"   8      2 GiB reserved on each: {', '.join(newer[newer.index('RTX 3080') : -4])}",
        f"  8 may not be enough of: {', '.join(newer[: newer.index('RTX 3080')])}",
        "  4 may not be enough of: RTX 2080 Ti, T4",
    ]
    assert table(rows, given).splitlines()[-1] == (
        "  no answer for RTX 2080 Ti, T4, V100-16, P100-16, V100-32: `lowtide estimate --how plain --rank 0` says why, "
        "on V100-32"
    )


SHARDED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x):
        return x + torch.special.erf(self.down(nn.functional.gelu(self.up(self.norm(x))))).sinh()

model = nn.Sequential(*[Block() for _ in range(3)]).to(device)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
""" + STEPS.replace("(8, 64", "(512, 64")


FROM_META = """
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
fully_shard(model, mesh=mesh)
model.to_empty(device=device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model.unshard(async_op=True)
    model(torch.randn(8, 64, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_from_the_meta_device_is_gathered_ahead(estimate: Estimate) -> None:
    code, out, err = estimate(FROM_META, "--rank", "0")
    assert code == 0, err
    assert "gathered parameters" in out


def test_an_evaluation_of_a_model_from_the_meta_device_is_refused(estimate: Estimate) -> None:
    evaluates = "with torch.no_grad():\n    model(torch.randn(8, 64, device=device))\n"
    code, out, err = estimate(FROM_META.replace("for _ in", f"{evaluates}for _ in"), "--rank", "0")
    assert code == 2
    assert not out
    assert "the model is called before its first training step" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan for two GPUs that are not there."""
    folder = tmp_path_factory.mktemp("planned")
    script, saved = folder / "train.py", folder / "plan.json"
    script.write_text(HEAD + SHARDED, encoding="utf-8")
    options = ("--device", "2 x h100-80", "--budget", "60%", "-o", str(saved))
    assert cli.main(("plan", "make", *options, str(script))) == 0
    return saved


def test_a_step_under_a_plan_file_peaks_where_the_plan_predicts(
    planned: Path, estimate: Estimate, tmp_path: Path
) -> None:
    options = ("--rank", "1", "--plan", str(planned), "--json", str(tmp_path / "out.json"))
    code, out, err = estimate(SHARDED, *options)
    assert code == 0, err
    plan = lowtide.Plan.from_json(planned)
    under = json.loads((tmp_path / "out.json").read_text())[0]["plan"]
    assert under["peak_bytes"] == under["predicted_bytes"] == plan.predicted.peak_bytes <= plan.budget_bytes
    assert under["budget_bytes"] == plan.budget_bytes < plan.plain.peak_bytes
    assert re.search("^under the plan: .* is within its budget of [^;]*$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        pytest.param(SHARDED.replace("(256, 64)", "(128, 64)").replace("(64, 256)", "(64, 128)"), "model", id="model"),
        pytest.param(SHARDED.replace("(512, 64", "(513, 64"), "batch", id="batch"),
    ],
)
def test_a_plan_of_another_step_is_refused(text: str, difference: str, planned: Path, estimate: Estimate) -> None:
    code, out, err = estimate(text, "--rank", "0", "--plan", str(planned))
    assert code == 2
    assert not out
    assert "this plan is not for the FSDPSequential that the script trains" in err
    assert f"{difference}: made for" in err


def test_only_the_started_processes_load_torch(run_python: RunPython) -> None:
    command = ["estimate", "--device", "2 x h100-80", "--batch", "8", __file__]
    done = run_python(
        "-c",
        f"import sys; import lowtide.cli.several_gpus; from lowtide import cli; cli.main({command}); "
        "print('torch' in sys.modules)",
    )
    assert "--batch works with one GPU" in done.stderr
    assert done.stdout == "False\n"


@pytest.mark.parametrize("others", [("--batch", "8", "--rank", "0"), ("--fewest",), ("--how", "replayed")])
def test_a_plan_goes_with_one_step(others: tuple[str, ...], tmp_path: Path, estimate: Estimate) -> None:
    (tmp_path / "plan.json").touch()
    code, _, err = estimate(SHARDED, "--plan", str(tmp_path / "plan.json"), *others)
    assert code == 2
    assert "--plan is for the step and the batch that it was made for" in err
