"""`lowtide estimate --device`: what scripts for CUDA ask of torch, before their first forward and after it."""

import json
import re
from collections.abc import Callable

import pytest
import torch

from lowtide import cli

Estimate = Callable[..., tuple[int, str, str]]


@pytest.fixture
def estimate(tmp_path, capfd: pytest.CaptureFixture[str]) -> Estimate:
    def command(text: str, *options: str, args: tuple[str, ...] = ()) -> tuple[int, str, str]:
        path = tmp_path / "train.py"
        path.write_text(text, encoding="utf-8")
        capfd.readouterr()
        code = cli.main(("estimate", "--device", "RTX 3060", *options, str(path), *args))
        torch.set_default_device(None)
        return (code, *capfd.readouterr())

    return command


IDIOMS = """
import numpy as np, torch, warnings
from torch import nn
from torch.autograd import Variable
from torch.profiler import ProfilerActivity, profile

warnings.simplefilter("ignore")
C, dev = torch.cuda, torch.device("cuda")
x = torch.randn(3)

def a_type():
    y = x.type(C.FloatTensor)
    return y.is_cuda and y.type() == "torch.cuda.FloatTensor" and y.dtype is torch.float32

def a_default_type():
    torch.set_default_tensor_type(C.FloatTensor)
    there = torch.zeros(3).is_cuda and torch.tensor([1.0]).is_cuda
    torch.set_default_tensor_type(torch.FloatTensor)
    return there and not torch.zeros(3).is_cuda

def a_device_by_number():
    with torch.device(0):
        return torch.zeros(2).is_cuda

def a_rate():
    start, end = C.Event(enable_timing=True), C.Event(enable_timing=True)
    start.record(), end.record(), C.synchronize()
    return 1 / start.elapsed_time(end) > 0

def a_profile():
    for activities in ([ProfilerActivity.CPU, ProfilerActivity.CUDA], [ProfilerActivity.CUDA]):
        with profile(activities=activities) as found:
            torch.ones(3).cuda() + 1
    with torch.autograd.profiler.emit_nvtx():
        found.key_averages().table(sort_by="cuda_time_total")
    return True

IDIOMS = {
    "type": a_type,
    "type by name": lambda: x.type("torch.cuda.HalfTensor").dtype is torch.half,
    "type and back": lambda: not x.cuda().type(torch.FloatTensor).is_cuda,
    "a dtype stays": lambda: x.cuda().type(torch.float64).is_cuda,
    "isinstance": lambda: isinstance(x.cuda(), C.FloatTensor) and not isinstance(x, C.FloatTensor),
    "of an array": lambda: C.FloatTensor(np.zeros((3, 2), "float32")).shape == (3, 2),
    "of numbers": lambda: C.LongTensor([1, 2]).tolist() == [1, 2],
    "of sizes": lambda: C.FloatTensor(2, 3).fill_(1.0).is_cuda,
    "sparse": lambda: C.sparse.FloatTensor(torch.tensor([[0], [1]]), torch.ones(1), torch.Size([2, 2])).is_sparse,
    "type_as": lambda: x.type_as(x.cuda()).is_cuda and not x.cuda().type_as(x).is_cuda,
    "a variable": lambda: Variable(x.type(C.FloatTensor), requires_grad=True).is_cuda,
    "a default type": a_default_type,
    "a device by number": lambda: torch.device(C.current_device()) == torch.device("cuda", 0) and a_device_by_number(),
    "to a number": lambda: x.to(0).is_cuda and x.to(device=torch.device(0)).is_cuda,
    "a layer by number": lambda: nn.Linear(2, 2, device=0).weight.is_cuda,
    "a layer of a type": lambda: next(nn.Linear(2, 2).type(C.FloatTensor).parameters()).is_cuda,
    "to_empty": lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.is_cuda,
    "pinned": lambda: torch.empty(3, pin_memory=True).shape == (3,),
    "events": a_rate,
    "streams": lambda: torch.Stream(device="cuda").synchronize() is None and torch.Event("cuda").record() is None,
    "the runtime": lambda: C.check_error(C.cudart().cudaProfilerStart()) is None,
    "versions": lambda: int(torch.version.cuda.split(".")[0]) > 11 and C.nccl.version() > (2, 10),
    "cudnn": lambda: torch.backends.cudnn.is_available() and torch.backends.cudnn.version() > 8000,
    "profilers": a_profile,
    "history": lambda: C.memory._record_memory_history() is None and C.memory._snapshot()["segments"] is not None,
    "accelerator": lambda: torch.accelerator.memory_allocated() == C.memory_allocated(0),
    "generators": lambda: C.default_generators[0].initial_seed() == torch.initial_seed(),
    "a summary": lambda: "GPU reserved memory" in C.memory_summary(),
}


def ask():
    for name, idiom in IDIOMS.items():
        assert idiom(), name


ask()
model = nn.Linear(8, 8).to(torch.device(torch.cuda.current_device()))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss = model(torch.randn(4, 8).type(C.FloatTensor)).sum()
    optimizer.zero_grad(), loss.backward(), optimizer.step()
    ask()
"""


def test_torch_cuda_answers_before_and_after_the_first_forward(estimate: Estimate) -> None:
    code, out, err = estimate(IDIOMS)
    assert code == 0, err
    assert "it fits" in out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph: a CUDA graph records kernels"),
        ("torch.cuda.graph(None)", "torch.cuda.graph: a CUDA graph records kernels"),
        ("torch.cuda.MemPool()", "torch.cuda.MemPool: memory allocated outside torch's own allocator"),
        ("torch.cuda.FloatStorage(3)", "torch.cuda.FloatStorage: legacy storages"),
        ("torch.cuda.comm.broadcast(torch.ones(3), [0])", "torch.cuda.comm.broadcast: an estimate is for one GPU"),
    ],
)
def test_actions_that_an_absent_gpu_can_not_do_are_refused_by_name(estimate: Estimate, asked: str, said: str) -> None:
    code, _, err = estimate(f"import torch\nassert not isinstance(1, torch.cuda.CUDAGraph)\n{asked}\n")
    assert code == 2
    assert said in err
    assert "Traceback" not in err


RECURRENT = """
import sys, torch
from torch import nn

kind, device = sys.argv[1:]
made = {"LSTM": nn.LSTM, "GRU": nn.GRU, "LSTMCell": nn.LSTMCell, "attention": nn.MultiheadAttention}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = made[kind](32, 4) if kind == "attention" else made[kind](32, 48)
        self.head = nn.Linear(32 if kind == "attention" else 48, 10)

    def forward(self, x):
        if kind == "attention":
            return self.head(self.layer(x, x, x, need_weights=False)[0])
        if kind != "LSTMCell":
            return self.head(self.layer(x)[0])
        state = None
        for row in x:
            state = self.layer(row, state)
        return self.head(state[0])

model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss = model(torch.randn(7, 64, 32, device=device)).square().mean()
    optimizer.zero_grad(), loss.backward(), optimizer.step()
"""


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "attention"])
def test_a_layer_with_kernels_of_its_own_is_on_the_gpu_where_a_script_stays_on_the_cpu(
    estimate: Estimate, kind: str
) -> None:
    found = []
    for device in ("cpu", "cuda"):
        code, out, err = estimate(RECURRENT, "--json", "-", args=(kind, device))
        assert code == 0, err
        found.append(json.loads(out)[0]["peak_requested_bytes"])
    assert found[0] == found[1]


PACKED = """
import torch
from torch import nn

rnn = nn.GRU(28, 64, batch_first=True).to("cuda")
optimizer = torch.optim.Adam(rnn.parameters())
for _ in range(3):
    x = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 20, 28).cuda(), [20, 15, 2], batch_first=True)
    out, last = rnn(x)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    optimizer.zero_grad()
    padded.mean().backward()
    optimizer.step()
print(out.data.is_cuda, out.batch_sizes.is_cuda, tuple(padded.shape), lengths.tolist())
"""


def test_sequences_that_are_packed_before_the_first_forward_keep_their_sizes_on_the_cpu(estimate: Estimate) -> None:
    code, out, err = estimate(PACKED)
    assert code == 0, err
    assert "it fits, if some memory is as measured on one GPU" in out


def test_recurrent_layers_fit_by_one_gpus_measurement_and_not_where_that_is_too_little(estimate: Estimate) -> None:
    for strict, code in (((), 0), (("--strict",), 1)):
        found, out, _ = estimate(RECURRENT, *strict, args=("LSTM", "cuda"))
        assert found == code
        assert "it fits, if some memory is as measured on one GPU" in out
        assert "counted as measured on one GPU, an H200 with cuDNN 9.19" in out
    code, out, _ = estimate(RECURRENT.replace("randn(7, 64", "empty(7, 2000000"), args=("LSTM", "cuda"))
    assert code == 1
    assert "it does not fit" in out
    plain, _, _ = estimate(RECURRENT, "--strict", args=("attention", "cuda"))
    assert plain == 0  # all of it is known


PEAKS = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
model = nn.Sequential(*layers).cuda()
x = torch.randn(512, 256, device="cuda")
# parameters, each in blocks of 512 bytes, and the batch
assert torch.cuda.memory_allocated() == sum(-(-p.nbytes // 512) * 512 for p in model.parameters()) + x.nbytes
assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
ways = {
    "plain": model,
    "sequential": lambda x: checkpoint_sequential(model, 4, x, use_reentrant=False),
    "whole": lambda x: checkpoint(model, x, use_reentrant=False),
}
for name in ORDER:
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    loss = ways[name](x).square().sum()
    loss.backward()
    print(name, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
    assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved()
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= torch.cuda.memory_reserved() <= before == torch.cuda.max_memory_reserved()
    stats = torch.cuda.memory_stats()
    assert stats["active_bytes.all.current"] == torch.cuda.memory_allocated() <= stats["reserved_bytes.all.current"]
    parts = [stats[f"allocated_bytes.{pool}.current"] for pool in ("small_pool", "large_pool")]
    assert sum(parts) == torch.cuda.memory_allocated() and all(parts)
    free, total = torch.cuda.mem_get_info()
    assert total - free > torch.cuda.memory_reserved()
    model.zero_grad()
    del loss
"""


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("order", [("plain", "sequential"), ("sequential", "plain"), ("whole",)])
def test_a_loop_without_an_optimizer_is_rehearsed_and_prints_the_allocators_peaks(
    estimate: Estimate, order: tuple[str, ...]
) -> None:
    code, out, err = estimate(PEAKS.replace("ORDER", repr(order)), "--json", "-")
    assert code == 0, err
    printed = {name: int(peak) for name, peak in re.findall(r"^(\w+) (\d+) \d+$", err, re.MULTILINE)}
    assert [*printed] == [*order]
    if len(order) == 2:
        assert printed["sequential"] < printed["plain"]
    assert json.loads(out)[0]["peak_allocated_bytes"] == max(printed.values())


def test_a_loop_without_an_optimizer_is_reported(estimate: Estimate) -> None:
    text = "import torch\nmodel = torch.nn.Linear(64, 64)\nfor _ in range({}):\n    model(torch.randn(8, 64)).sum(){}"
    for n_passes, said in ((1, "1 forward and backward pass"), (3, "3 forward and backward passes")):
        code, out, _ = estimate(text.format(n_passes, ".backward()"))
        assert code == 0
        assert f"at the peak of {said} (no optimizer stepped)" in out
    code, out, _ = estimate(text.format(1000, ".backward()"))
    assert "32 forward and backward passes" in out  # and no more of a loop that may be long
    code, _, err = estimate(text.format(3, ""))
    assert code == 2
    assert "no optimizer stepped" in err


DISTRIBUTED = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

wraps = sys.argv[1] == "wrapped"
model = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
if wraps:
    dist.init_process_group("nccl", init_method="file://" + sys.argv[2], rank=0, world_size=1)
    dist.barrier(device_ids=[0])
    model = DistributedDataParallel(model, device_ids=[0], output_device=0, gradient_as_bucket_view=len(sys.argv) > 3)
optimizer = torch.optim.AdamW(model.parameters())
try:
    for step in range(3):
        loss = model(torch.randn(64, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if wraps:
            dist.all_reduce(loss.detach())
finally:
    if wraps:
        dist.destroy_process_group()
"""


def test_a_script_for_several_gpus_is_rehearsed_with_the_buckets_of_its_gradients(estimate: Estimate, tmp_path) -> None:
    found = []
    for number, args in enumerate((("alone",), ("wrapped",), ("wrapped", "view"))):
        group = (str(tmp_path / f"group{number}"),) if number else ()
        code, out, err = estimate(DISTRIBUTED, "--json", "-", args=(*args[:1], *group, *args[1:]))
        assert code == 0, err
        found.append(json.loads(out)[0]["peak_requested_bytes"])
    gradients = 4 * (256 * 1024 + 1024 + 1024 * 2 + 1024 * 256 + 256)
    assert found[1] - found[0] == gradients
    assert found[2] == found[0]
