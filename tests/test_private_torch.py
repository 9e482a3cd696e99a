"""That the private names of torch in `lowtide._torch` exist and do what Lowtide relies on."""

import pytest
import torch
from torch.autograd.profiler import profile

from lowtide import _torch

# --- backward -------------------------------------------------------------------------------------------------------


def test_in_backward() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(_torch.in_backward()))
    assert not _torch.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not _torch.in_backward()


def test_raw_saved_gives_tensors_and_runs_no_hook() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert y.grad_fn is not None
    assert [saved.data_ptr() for saved in _torch.raw_saved(y.grad_fn)] == [y.data_ptr()]
    y.sum().backward()
    assert list(_torch.raw_saved(y.grad_fn)) == [None]

    def unpack(packed: object) -> torch.Tensor:
        raise AssertionError

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "packed", unpack):
        z = x.exp()
    assert z.grad_fn is not None
    assert list(_torch.raw_saved(z.grad_fn)) == ["packed"]


def test_raw_saved_of_a_custom_function() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x.clone())
            return 2 * x

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return 2 * grad

    y = Twice.apply(torch.ones(3, requires_grad=True))
    assert [saved.tolist() for saved in _torch.raw_saved(y.grad_fn)] == [[1, 1, 1]]
    y.sum().backward()
    assert list(_torch.raw_saved(y.grad_fn)) == []


# --- the profiler, on CPU -------------------------------------------------------------------------------------------


def test_the_profiler_reports_allocations_between_annotations(capfd: pytest.CaptureFixture[str]) -> None:
    assert not _torch.profiler_running()
    with profile(profile_memory=True) as profiler:
        assert _torch.profiler_running()
        annotation = _torch.RecordFunction("here")
        annotation.__enter__()
        annotation.__exit__(None, None, None)
        x = torch.empty(25)
        address = x.data_ptr()
        del x
    assert not _torch.profiler_running()
    here, empty, free = _torch.profiler_roots(profiler)
    assert (here.name, empty.name, free.name) == ("here", "aten::empty", _torch.ALLOCATION)
    assert here.start_time_ns < empty.start_time_ns < free.start_time_ns
    (allocation,) = empty.children
    assert (allocation.name, allocation.extra_fields.alloc_size) == (_torch.ALLOCATION, 100)
    assert (free.extra_fields.alloc_size, free.extra_fields.device.type) == (-100, "cpu")
    assert allocation.extra_fields.ptr == free.extra_fields.ptr == address


# --- the caching allocator, on CUDA ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_allocators_history_carries_our_text() -> None:
    assert not _torch.history_is_on()
    _torch.start_history()
    assert _torch.history_is_on()
    _torch.set_metadata("text")
    x = torch.empty(100, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    del x
    _torch.set_metadata("")
    trace = _torch.snapshot()["device_traces"][torch.cuda.current_device()]
    _torch.stop_history()
    ours = [(e["action"], e["addr"], e["size"], e["user_metadata"]) for e in trace if e["addr"] == address]
    assert ours == [(action, address, 100, "text") for action in ("alloc", "free_requested", "free_completed")]
    assert all(isinstance(e["time_us"], int) for e in trace)
