"""A step on a card that is not there: what CUDA's operators keep, what the allocator makes of it, whether it fits."""

import pytest
import torch
from torch import nn

import lowtide
from conftest import RunPython
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

    foreseen = lowtide.foresee(model, step, torch.randn(256, 1024), device="RTX 3060")
    parameters = 4 * (1024 * 2048 + 2048 + 2048 * 512 + 512)
    assert foreseen.static.parameters == parameters
    assert foreseen.static.optimizer == 2 * parameters  # the counters of steps are on the CPU
    assert foreseen.fits
    assert foreseen.peak_requested_bytes <= foreseen.peak_allocated_bytes <= foreseen.peak_reserved_bytes


def test_foreach_makes_the_optimizers_temporaries() -> None:
    """AdamW takes all parameters at once on CUDA: one more copy of them, where the CPU's takes them one by one."""
    case = build("gpt2")
    parameters = sum(p.numel() * p.element_size() for p in case.model.parameters())
    here = lowtide.foresee(case.model, case.step, case.batch)
    there = lowtide.foresee(case.model, case.step, case.batch, device="A100-40")
    optimizer = [next(p.peak_bytes for p in f.timeline.phases if p.name == "optimizer") for f in (here, there)]
    assert optimizer[1] >= optimizer[0] + parameters // 2


@pytest.mark.parametrize("device", ["nothing", "A100"])
def test_a_card_that_is_unclear_is_refused(device: str) -> None:
    case = build("gpt2")
    with pytest.raises(lowtide.LowtideError, match="no card that is known"):
        lowtide.foresee(case.model, case.step, case.batch, device=device)


TRAINS_BESIDE = """
import warnings

import torch, lowtide

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())

def step(batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def trained(look):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    optimizer.state.clear()
    losses = []
    for _ in range(3):
        losses.append(step(torch.ones(4, 8)).item())
        if look:
            lowtide.foresee(model, step, torch.ones(4, 8), device="A100-40")
    return losses

plain = trained(look=False)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert trained(look=True) == plain
assert not torch.cuda.is_available() and not torch.accelerator.is_available()
assert not torch.is_autocast_enabled("cudalike")
batches = torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4, pin_memory=False)
assert [step(batch).item() > 0 for batch in batches] == [True, True]
"""


def test_training_goes_on_between_rehearsals_bit_by_bit(run_python: RunPython) -> None:
    done = run_python("-c", TRAINS_BESIDE)
    assert done.returncode == 0, done.stderr


TAKEN = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("npu")
import lowtide

model = torch.nn.Linear(2, 2)
step = lambda batch: model(batch).sum().backward()
lowtide.foresee(model, step, torch.ones(1, 2), device="A100-40")
"""


def test_who_has_another_device_is_told_so(run_python: RunPython) -> None:
    done = run_python("-c", TAKEN)
    assert "RehearsalError" in done.stderr
    assert "the device 'npu' has torch's one place" in done.stderr


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
        assert torch.cuda.memory_allocated() - before == kept.nbytes == 4000
        torch.cuda.synchronize()
        model(moved + made).sum().backward()

    assert lowtide.foresee(model, step, torch.randn(4, 8), device="L4").fits
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "L4"
