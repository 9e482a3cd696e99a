"""A step on a GPU that is not there: what CUDA's operators keep, what the allocator makes of it, whether it fits."""

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from conftest import RunPython
from lowtide.estimator.absent_processes import AbsentProcesses
from lowtide.estimator.cuda.ops.matmul import count_workspace_bytes
from lowtide.memory.gpu_specs import parse_gpu
from lowtide.units import format_bytes
from models import build

MIB = 2**20


def test_a_linear_layer_byte_by_byte() -> None:
    """From first principles: two workspaces of cuBLAS, parameters, gradients, moments, the batch, one activation."""
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    estimated = lowtide.estimate(model, step, torch.randn(256, 1024), device="RTX 3060")
    parameters = 4 * (1024 * 2048 + 2048 + 2048 * 512 + 512)
    assert estimated.static.parameters == parameters
    assert estimated.static.optimizer == 2 * parameters  # the counters of steps are on the CPU
    assert estimated.fits
    assert estimated.peak_requested_bytes <= estimated.peak_allocated_bytes <= estimated.peak_reserved_bytes


@pytest.mark.parametrize("version", ["2.13.1", "2.15.0+cu132"])
def test_a_torch_whose_sources_were_not_read_is_said(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    case = build("gpt2")
    estimated = lowtide.estimate(case.model, case.step, case.batch, device="RTX 3060")
    said = ("CUDA's behaviours of torch 2.13, whose sources were read: this is torch 2.15.0+cu132",)
    assert estimated.assumed == (said if version == "2.15.0+cu132" else ())
    assert estimated.fits


def test_tensors_come_to_the_gpu_in_the_format_that_is_asked_for() -> None:
    model = nn.Conv2d(3, 8, 3)

    def step(batch: torch.Tensor) -> None:
        given = batch.cuda(memory_format=torch.channels_last)
        assert given.is_contiguous(memory_format=torch.channels_last)
        assert batch.to("cuda", memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
        assert not batch.cuda(0, non_blocking=True).is_contiguous(memory_format=torch.channels_last)
        model(given).sum().backward()

    lowtide.estimate(model, step, torch.randn(4, 3, 16, 16), device="L4")


def test_foreach_makes_the_optimizers_temporaries() -> None:
    """AdamW takes all parameters at once on CUDA: one more copy of them, where the CPU's takes them one by one."""
    case = build("gpt2")
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())
    here = lowtide.estimate(case.model, case.step, case.batch)
    there = lowtide.estimate(case.model, case.step, case.batch, device="A100-40")
    optimizer = [next(p.peak_bytes for p in f.timeline.phases if p.name == "optimizer") for f in (here, there)]
    assert optimizer[1] >= optimizer[0] + parameters // 2


@pytest.mark.parametrize(("device", "what"), [("nothing", "no GPU that is known"), ("A100", "several GPUs")])
def test_a_gpu_that_is_unclear_is_refused(device: str, what: str) -> None:
    case = build("gpt2")
    with pytest.raises(lowtide.LowtideError, match=what):
        lowtide.estimate(case.model, case.step, case.batch, device=device)


def test_an_optimizer_in_backward_steps_there_as_well() -> None:
    """Each gradient is gone before the next one comes, as on a GPU."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    optimizers = {p: torch.optim.SGD([p]) for p in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    x = torch.randn(4, 512)

    def peak():
        return lowtide.estimate(model, lambda x: model(x).sum().backward(), x, device="L4").peak_bytes

    weight = 512 * 512 * 4
    plain = peak()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    assert plain > 16 * weight
    assert 9 * weight < peak() < 11 * weight


@pytest.mark.slow
def test_a_model_on_the_meta_device_and_a_plan_of_the_cpu() -> None:
    with torch.device("meta"):
        large = nn.Linear(2**15, 2**15)
    found = lowtide.estimate(large, lambda x: large(x).sum().backward(), torch.ones(1, 2**15), device="A100-40")
    assert found.static.parameters == (2**30 + 2**15) * 4
    assert large.weight.device.type == "meta"
    case = build("llama")
    plan = lowtide.plan(lowtide.rehearse(case.model, case.step, case.batch), "70%")
    plain, planned = (
        lowtide.estimate(case.model, case.step, case.batch, device="A100-40", **options)
        for options in ({}, {"plan": plan})
    )
    assert planned.peak_bytes < 0.8 * plain.peak_bytes


def test_an_operator_of_another_package_makes_the_answer_unknown() -> None:
    @torch.library.custom_op("lowtide_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)
    model = nn.Linear(8, 8)
    found = lowtide.estimate(model, lambda x: twice(model(x)).sum().backward(), torch.ones(2, 8), device="A100-80")
    assert (found.verdict, found.fits, found.smallest_gpu) == ("unknown", False, None)
    assert any("lowtide_tests::twice" in line for line in found.unknown)


def test_training_goes_on_between_rehearsals_bit_by_bit() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    start = [p.detach().clone() for p in model.parameters()]

    def trained(*, look: bool) -> list[float]:
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(batch):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = []
        for _ in range(3):
            losses.append(step(torch.ones(4, 8)).item())
            if look:
                lowtide.estimate(model, step, torch.ones(4, 8), device="A100-40")
        return losses

    plain = trained(look=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(look=True) == plain
    assert not torch.accelerator.is_available() or torch.cuda.is_available()
    assert not torch.is_autocast_enabled("cudalike")


TAKEN = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npu")
import lowtide

model = torch.nn.Linear(2, 2)
step = lambda batch: model(batch).sum().backward()
lowtide.estimate(model, step, torch.ones(1, 2), device="A100-40")
"""


def test_an_estimate_is_refused_where_another_package_has_the_device_place(run_python: RunPython) -> None:
    done = run_python("-c", TAKEN)
    assert "RehearsalError" in done.stderr
    assert "the device 'npu' occupies torch's only slot" in done.stderr


def test_cuda_is_there_in_the_step_and_nowhere_else() -> None:
    model = nn.Linear(8, 8)

    def step(batch):
        moved = batch.to("cuda", non_blocking=True)
        made = torch.zeros(8, device=torch.device("cuda", 0))
        assert moved.is_cuda
        assert made.is_cuda
        assert not torch.zeros(2).is_cuda
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_name() == "L4"
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(torch.cuda.Stream()):
            kept = torch.empty(1000, device="cuda")
        assert (torch.cuda.memory_allocated() - before, kept.nbytes) == (4096, 4000)  # blocks of 512
        torch.cuda.synchronize()
        model(moved + made).sum().backward()

    assert lowtide.estimate(model, step, torch.randn(4, 8), device="L4").fits
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "L4"


MAKES = {
    "asked for": lambda: torch.rand(4, 8).requires_grad_(),
    "set": lambda: setattr(found := torch.rand(4, 8), "requires_grad", True) or found,
    "made with": lambda: torch.rand(4, 8, requires_grad=True),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_gradients_of_what_a_script_made_on_the_cpu(make: Callable[[], torch.Tensor]) -> None:
    critic = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))

    def step(batch):
        mix = make()
        (slope,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
        ((slope.norm(dim=1) - 1).square().mean() + critic(batch).mean()).backward()

    estimated = lowtide.estimate(critic, step, torch.ones(4, 8), device="L4")
    assert any("a tensor on the CPU is assumed to be on the GPU" in line for line in estimated.assumed)


def test_recomputed_forwards_in_backward_are_on_the_gpu_as_well() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 16)

        def forward(self, x):
            assert str(x.device) == "cuda:0"
            at = torch.arange(len(x), device=x.device, dtype=torch.float32)
            assert int(torch.arange(3, device="cuda").sum()) == 3
            return self.body(x + at[:, None]).tanh() * torch.ones(16, device="cuda")

    model = Shifted()

    def step(batch):
        checkpoint(model, batch, use_reentrant=False).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nor is anything said of plans, where there is none
        assert lowtide.estimate(model, step, torch.randn(8, 16, requires_grad=True), device="L4").verdict == "fits"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_recomputed_forwards_in_backward_have_the_same_autocast(device) -> None:
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    seen = []

    def run(x):
        seen.append(body(x).dtype)
        with torch.autocast(device, enabled=False):
            seen.append(body(x).dtype)
        return body(x)

    def step(batch):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = checkpoint(run, batch, use_reentrant=False).float().sum()
        loss.backward()
        assert seen == [torch.bfloat16, torch.float32] * 2
        seen.clear()

    lowtide.estimate(body, step, torch.randn(8, 64, requires_grad=True), device="L4")


def test_states_of_the_cpus_random_number_generator_count_on_the_cpu_alone() -> None:
    blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def peak(preserves: bool, **on: str) -> int:
        def step(batch):
            for block in blocks:
                batch = checkpoint(block, batch, use_reentrant=False, preserve_rng_state=preserves)
            batch.sum().backward()

        return lowtide.estimate(blocks, step, torch.ones(64, 64, requires_grad=True), **on).peak_bytes

    assert (
        peak(True) - peak(False) == 2 * torch.get_rng_state().nbytes
    )  # of the first block, and while it is recomputed
    assert peak(True, device="L4") == peak(False, device="L4")


def test_an_error_out_of_a_saved_tensor_is_the_steps_error() -> None:
    model = nn.Linear(8, 8)

    def refuse(packed):
        sys._clear_type_cache()  # as when enough else has been looked up: the error is not to depend on it
        raise ValueError(f"nothing is left of {packed}")

    def step(batch):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "it", refuse):
            loss = model(batch).tanh().sum()
        loss.backward()

    with pytest.raises(ValueError, match="nothing is left of it"):
        lowtide.estimate(model, step, torch.randn(4, 8), device="L4")


@torch.library.custom_op("lowtide_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


doubled.register_autograd(lambda ctx, gradient: gradient * 2)


def test_fake_kernels_of_others_make_tensors_where_their_arguments_are() -> None:
    model = nn.Linear(8, 8)

    def step(batch):
        assert batch.device.type == "cuda"
        doubled(model(batch)).sum().backward()

    estimated = lowtide.estimate(model, step, torch.randn(4, 8), device="L4")
    assert "lowtide_tests::doubled" in " ".join(estimated.unknown)


def test_a_module_that_is_moved_in_its_forward_stays_on_the_gpu() -> None:
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.chooses = nn.Linear(8, 8)

        def forward(self, x):
            self.chooses = self.chooses.to(torch.float32)
            return self.chooses(x)

    model = Router()
    weight = model.chooses.weight
    before = weight.detach().clone()

    def step(batch):
        model(batch).sum().backward()
        model.zero_grad()

    assert lowtide.estimate(model, step, torch.randn(4, 8), device="L4").verdict == "fits"
    assert model.chooses.weight is weight
    assert torch.equal(weight, before)


def test_a_piece_of_something_larger_comes_alone() -> None:
    model, table = nn.Linear(64, 10), torch.randn(10_000, 64)

    def step(batch):
        model(batch).sum().backward()

    piece = lowtide.estimate(model, step, table[32:64], device="L4")
    alone = lowtide.estimate(model, step, table[32:64].clone(), device="L4")
    assert piece.static.inputs == alone.static.inputs == 32 * 64 * 4
    assert piece.peak_reserved_bytes == alone.peak_reserved_bytes


def test_known_contents_move_to_the_gpu_and_end_with_the_cpu_tensors() -> None:
    model, anchors = nn.Linear(16, 4), torch.arange(64).view(8, 8)
    rows = []

    def step(batch):
        keep = torch.zeros(8, dtype=torch.bool)
        assert batch[keep].shape[0] == 0
        keep[2] = True
        assert batch[keep].shape[0] == 1
        near = anchors[:, 2:5] > 16
        assert batch[near[:, 0]].shape[0] == 6
        model(batch).sum().backward()
        total = torch.zeros(4)
        total += model(batch).detach().sum(0)
        rows.append(bool((total == 0).all()))

    with pytest.raises(lowtide.DataDependentStepError, match="contents of a tensor"):
        lowtide.estimate(model, step, torch.randn(8, 16), device="L4")
    assert rows == []


def test_gpu_results_may_be_written_to_a_tensor_made_without_a_device() -> None:
    model, head = nn.Linear(16, 16), nn.Linear(16, 4)

    def step(batch):
        h = model(batch)
        sums = torch.zeros(4, 16).index_add_(0, torch.arange(8) % 4, h)
        firsts = torch.zeros(8, 16)
        firsts[:4] = h[:4]
        head(sums.relu()).sum().backward(retain_graph=True)
        head(firsts).sum().backward()
        assert model.weight.grad is not None

    whole = nn.ModuleList([model, head])
    assert lowtide.estimate(whole, step, torch.randn(8, 16), device="L4").verdict == "fits"


def test_the_peak_of_both_steps_is_distinguished_from_the_shown_one() -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    sizes = [65536, 256]

    def step(batch):
        model(batch.expand(sizes[0], -1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.reverse()

    workspaces = count_workspace_bytes(parse_gpu("L4"))
    for which, n_bytes in (("first", workspaces), ("second", 2 * workspaces)):  # the second is of backward's thread
        estimated = lowtide.estimate(model, step, torch.randn(1, 256), device="L4")
        said = f"both steps, in the {which} one, with {format_bytes(n_bytes)} of cuBLAS's"
        assert said in str(estimated)
        record = estimated.to_record()
        (need,) = record.needs
        assert said in need.peak_of
        assert need.gpu == "L4"
        assert "250 MiB to 700 MiB for the CUDA context, which is not the allocator's" in record.assumed
        several = replace(estimated, processes=AbsentProcesses(rank=1, size=8))
        assert several.on_gpu().gpu == "each of 8 x L4, rank 1"
        sizes.reverse()


def test_results_that_no_cpu_kernel_computes_are_unknown() -> None:
    """`histc` of integers has a kernel for CUDA alone; models take it there to count the tokens of each expert."""
    model, batch = nn.Linear(4, 4), torch.arange(12).reshape(3, 4)

    def step(batch: torch.Tensor) -> None:
        ids = batch % 3
        counted = torch.histc(ids.int() if ids.is_cuda else ids.float(), bins=3, min=0, max=2)
        (model(batch.float()).sum() * counted.cumsum(0)[-1]).backward()

    assert not [note for note in lowtide.estimate(model, step, batch, device="T4").assumed if "histc" in note]
