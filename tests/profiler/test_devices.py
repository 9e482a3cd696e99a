"""Differences where the model is on a device: threads, random numbers, another GPU than the current one.

Autograd runs the backward of a device's tensors in a thread of its own; here a thread of Python's stands for it.
"""

import gc
import itertools
import queue
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import lowtide
from comparing import equal
from lowtide._torch.cuda_history import drop_workspaces
from lowtide._torch.modes import saved_tensor_hooks
from lowtide.memory.cuda_recorder import CudaRecorder
from lowtide.memory.memory_timeline import Timeline
from lowtide.planner import find_smallest_peak
from lowtide.profiler.audit import Audit
from lowtide.profiler.measure_call import identical
from lowtide.profiler.preconditions import list_nondeterminism_notes
from lowtide.runtime import inplace_gradients as in_place
from lowtide.runtime.call_context import CallContext
from lowtide.runtime.call_interceptor import CallInterceptor
from lowtide.runtime.engine import Engine
from lowtide.runtime.inplace_kernels import OPERATORS
from lowtide.state.step_outcome import digest


class Forces(nn.Module):
    """A model whose forward has a backward pass in it, with a graph, and that in another thread, as a device would."""

    def __init__(self) -> None:
        super().__init__()
        self.threaded = True
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        places = places.requires_grad_()
        energy = self.layers(places)
        hooks, found = saved_tensor_hooks(), list[torch.Tensor | BaseException]()

        def differentiate() -> None:
            try:
                found.extend(torch.autograd.grad(energy.sum(), places, create_graph=True))
            except BaseException as error:
                found.append(error)

        def in_another_thread() -> None:
            if hooks is None:
                return differentiate()
            with saved_tensors_hooks(*hooks):  # which autograd has in its threads, too
                return differentiate()

        if self.threaded:
            thread = threading.Thread(target=in_another_thread)
            thread.start()
            thread.join()
        else:
            differentiate()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0].square().mean() + energy.mean()


def test_a_backward_inside_of_the_forward_may_run_in_another_thread():
    torch.manual_seed(0)
    model, batch = Forces(), torch.randn(256, 32)

    def step(batch):
        model.zero_grad(set_to_none=True)
        model(batch.clone()).backward()
        return [p.grad.clone() for p in model.parameters()]

    model.threaded = False  # a recording of a CPU does not follow Python's threads
    plain = step(batch)
    profile = lowtide.rehearse(model, step, batch)
    made = lowtide.plan(profile, find_smallest_peak(profile)[1].peak_bytes + 1000)
    assert made.recompute
    audits = []
    for model.threaded in (False, True):
        audit = Audit(model, frozenset(), lambda *_: None)
        with audit.running():
            step(batch)
        audits.append([(slot.address, audit.step.values[slot.value].recipe) for slot in audit.step.slots])
        with lowtide.apply(model, made) as applied:
            assert equal(step(batch), plain)
            assert not applied.drifted
    assert audits[0] == audits[1]


def test_a_digest_is_of_the_elements_however_they_lie():
    tensor = torch.randn(6, 4)
    assert digest(tensor.t()) == digest(tensor.t().contiguous()) != digest(tensor)
    assert digest(tensor[:, 0]) == digest(tensor[:, 0].contiguous()) != digest(tensor[:, 1])


def test_eight_bit_numbers_are_compared():
    one = torch.tensor([0.0, -0.0, torch.nan, 2.0])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert identical(one.to(dtype), one.to(dtype))
        assert not identical(one.to(dtype), one.flip(0).to(dtype))


def test_random_numbers_of_the_host_are_no_memory_of_a_gpu():
    model = nn.BatchNorm1d(4)
    seen = CallContext(CallInterceptor(Engine(model), model, "", ()).mutable_state)
    assert seen.nbytes == torch.get_rng_state().nbytes + sum(buffer.nbytes for buffer in model.buffers())
    seen.mutable_state.gpus = frozenset({torch.device("cuda:0")})
    assert seen.nbytes == 0  # these buffers are on the host


def test_memory_of_a_failed_step_is_freed_before_it_is_tried_again():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(64, 64)
    numbers, made, gone = itertools.count(), queue.SimpleQueue(), queue.SimpleQueue()  # no rehearsal puts these back

    def step(batch):
        number = next(numbers)
        if number:
            gone.put(made.get_nowait()() is None)
        out = model(batch)
        made.put(weakref.ref(out))
        if number == 0:
            torch.empty(2**60, dtype=torch.uint8)
        out.sum().backward()

    profile = lowtide.rehearse(model, step, batch)
    assert "ran out of memory" in " ".join(profile.notes)
    assert gone.get_nowait()


# --- on a device ----------------------------------------------------------------------------------------------------


def language_model(device: str, dropout: float = 0.1) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(128, 4, 512, dropout, batch_first=True, norm_first=True, activation="gelu")
    return nn.TransformerEncoder(block, 4).to(device), torch.randn(8, 64, 128, device=device)


def between(profile: lowtide.Profile, share: float) -> int:
    """Bytes, at `share` of the way from the smallest peak to the plain one."""
    _, least = find_smallest_peak(profile)
    return int(least.peak_bytes + share * (profile.measured_plain_peak_bytes - least.peak_bytes))


def training_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_step_on_a_gpu_fits_by_the_allocators_own_count(share):
    gc.collect()
    drop_workspaces()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # of other tests
    model, batch = language_model("cuda")
    step = training_step(model)
    profile = lowtide.rehearse(model, step, batch)
    budget = between(profile, share)
    with lowtide.fit(model, step, batch, budget=budget, profile=profile) as fitted:
        assert fitted.verdict.identical
        assert fitted.verdict.predicted_peak_bytes == pytest.approx(fitted.verdict.measured_peak_bytes, rel=0.02)
        for _ in range(2):
            step(batch)
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= budget + 2**16


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # memory-efficient attention, and flash attention
def test_blocks_with_fused_attention_can_be_replayed(dtype, dropout):
    model, batch = language_model("cuda", dropout)
    model, batch = model.to(dtype), batch.to(dtype)
    profile = lowtide.rehearse(model, training_step(model), batch)
    assert [call.refused for call in profile.calls if call.cls == "TransformerEncoderLayer"] == [None] * 4


@pytest.mark.gpu
def test_gradients_in_place_on_a_gpu():
    assert {"LogSoftmaxBackward0", "GeluBackward0", "NativeGroupNormBackward0"} <= set(in_place.available("cuda"))
    more = {}
    for node in sorted(in_place.available("cuda")):
        x = torch.randn(4, 32, 64, 64, device="cuda", requires_grad=True)

        def gradient(node=node, x=x):
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            (found,) = torch.autograd.grad((OPERATORS[node].forward(x * 1) * x.detach()).sum(), x)
            return found, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

        (plain, plain_bytes), wrote = gradient(), []
        with in_place.InPlacePermission("cuda", lambda node, n_bytes, wrote=wrote: wrote.append(node)) as writing:
            writing.least = {node: 0}
            found, found_bytes = gradient()
        assert torch.equal(found, plain)
        assert wrote == [node]
        if found_bytes > plain_bytes:
            more[node] = found_bytes - plain_bytes
    assert not more


@pytest.mark.gpu
def test_a_plan_never_has_the_host_wait_for_the_gpu():
    model, batch = language_model("cuda")

    def step(batch):
        model(batch).square().mean().backward()

    profile = lowtide.rehearse(model, step, batch)
    with lowtide.fit(model, step, batch, budget=between(profile, 0.5), profile=profile) as fitted:
        assert fitted.plan.recompute
        step(batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_products_workspaces_are_in_every_recording():
    x = torch.randn(256, 256, device="cuda")
    peaks = []
    for _ in range(2):
        with CudaRecorder() as recorder:
            x @ x
        peaks.append(Timeline(recorder.stream).peak_bytes)
    assert peaks[0] == peaks[1] > 2**20 + x.nbytes


@pytest.mark.gpu
def test_memory_of_a_failed_step_is_free_again():
    model, batch = language_model("cuda")
    step, levels = training_step(model), []
    step(batch)

    def failing(batch):
        levels.append(torch.cuda.memory_allocated())
        if len(levels) == 1:
            loss = model(batch).square().mean()
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
            loss.backward()
        return step(batch)

    profile = lowtide.rehearse(model, failing, batch)
    assert levels[1] <= levels[0]
    assert profile.measured_plain_peak_bytes is not None  # only the audit had no room


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_a_model_on_another_gpu_than_the_current_one_is_measured_there():
    model, batch = language_model("cuda:1")
    step = training_step(model)
    profile = lowtide.rehearse(model, step, batch)
    assert torch.cuda.current_device() == 0
    activations = sum(storage.bytes for storage in profile.storages)
    assert profile.measured_plain_peak_bytes > profile.static.total + activations // 2


@pytest.mark.parametrize(("benchmark", "deterministic", "said"), [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_convolutions_that_may_take_another_algorithm_in_backward_are_said(monkeypatch, benchmark, deterministic, said):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    model, gpu = nn.Sequential(nn.Conv2d(1, 1, 3)), torch.device("cuda:0")
    assert len(list_nondeterminism_notes(model, gpu)) == said
    assert not list_nondeterminism_notes(model, torch.device("cpu"))
    assert not list_nondeterminism_notes(nn.Linear(1, 1), gpu)
