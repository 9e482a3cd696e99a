import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.errors import RehearsalError
from lowtide.memory import cpu_recorder
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.cuda_recorder import CudaRecorder
from lowtide.memory.events import Allocate, Mark
from lowtide.memory.measure import Memory, make_recorder, measure

# Batch, inputs, hidden and outputs of the network below, so chosen that no two of its tensors have the same size.
B, I, H, O = 6, 10, 14, 3  # noqa: E741
F32 = 4  # bytes

W1, B1, W2, B2 = H * I * F32, H * F32, O * H * F32, O * F32  # parameters, and so gradients
HIDDEN, OUT = B * H * F32, B * O * F32


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(I, H), nn.ReLU(), nn.Linear(H, O))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    x, y = torch.rand(B, I), torch.rand(B, O)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def allocated(memory: Memory) -> list[int]:
    return [event.bytes for event in memory.stream if isinstance(event, Allocate)]


# --- counted by hand ------------------------------------------------------------------------------------------------

FORWARD = [
    HIDDEN,  # first linear
    HIDDEN,  # ReLU, which saves its result; the linear's own is freed
    OUT,  # second linear
    OUT,  # the loss, sized for the squared differences before it becomes one number, and it stays so large
    OUT,  # the squared differences, freed
    8,  # B * O to divide their sum by, as an int64, freed
    4,  # and as a float32, freed
]
BACKWARD = [
    4,  # the gradient of the loss, 1.0
    OUT,  # gradient of the second linear's output; the output itself is freed
    HIDDEN,  # of the ReLU's output
    W2,  # of the second weight
    B2,  # and of its bias; the gradient of the output is freed
    HIDDEN,  # of the ReLU's input; that of its output and the ReLU's output are freed
    W1,  # of the first weight; the input is the batch and needs none
    B1,  # and of its bias
]


def test_forward_and_backward_of_an_mlp_counted_by_hand(model: nn.Sequential) -> None:
    x, y = torch.rand(B, I), torch.rand(B, O)
    with measure(model) as memory:
        loss = F.mse_loss(model(x), y)
        loss.backward()
    assert allocated(memory) == FORWARD + BACKWARD
    # The highest level is in the ReLU's backward: its result and the gradients of that and of its input are alive, the
    # gradients of the second linear's parameters, the loss, and the loss's gradient.
    assert memory.peak_bytes == 3 * HIDDEN + W2 + B2 + OUT + 4
    assert {category: [b.bytes for b in blocks] for category, blocks in memory.timeline.alive_at_peak().items()} == {
        "gradients": [W2, B2],
        "activations": [HIDDEN, OUT, 4],  # the loss's gradient is there before backward begins
        "temporaries": [HIDDEN, HIDDEN],
    }
    # What stays: the loss, whose storage is as large as the squared differences were, and the parameters' gradients.
    assert memory.timeline.curve[-1] == OUT + W2 + B2 + W1 + B1
    stays = memory.timeline.alive_at(len(memory.stream) - 1)
    assert [(b.bytes, b.name) for b in stays if b.category == "gradients"] == [
        (W1, "0.weight aten::mm"),
        (W2, "2.weight aten::mm"),
        (B1, "0.bias aten::sum"),
        (B2, "2.bias aten::sum"),
    ]
    del loss


def test_a_forward_without_gradients_holds_two_tensors_at_a_time(model: nn.Sequential) -> None:
    x = torch.rand(B, I)
    with torch.no_grad(), measure() as memory:
        model(x)
    assert allocated(memory) == [HIDDEN, HIDDEN, OUT]
    assert memory.peak_bytes == HIDDEN + HIDDEN  # the linear's output and the ReLU's
    assert memory.timeline.curve[-1] == 0


def test_a_step_of_sgd_allocates_nothing(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    with measure(model, optimizer) as memory:
        optimizer.step()
    assert (allocated(memory), memory.peak_bytes) == ([], 0)


def test_a_step_of_sgd_with_momentum_keeps_a_copy_of_each_gradient(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    x, y = torch.rand(B, I), torch.rand(B, O)
    F.mse_loss(model(x), y).backward()
    with measure(model, optimizer) as memory:
        optimizer.step()
    assert allocated(memory) == [W1, B1, W2, B2]
    assert memory.peak_bytes == W1 + B1 + W2 + B2
    assert {b.name.split()[1] for b in memory.timeline.alive_at_peak()["optimizer state"]} == {"momentum_buffer"}


def test_the_first_step_of_adamw_makes_its_state_counted_by_hand(model: nn.Sequential) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x, y = torch.rand(B, I), torch.rand(B, O)
    F.mse_loss(model(x), y).backward()
    with measure(model, optimizer) as memory:
        optimizer.step()
    counter = 4  # "step", one float32 a parameter
    state = 4 * counter + 2 * (W1 + B1 + W2 + B2)  # and "exp_avg" and "exp_avg_sq"
    assert memory.timeline.curve[-1] == state
    by_category = memory.timeline.alive_at_peak()
    assert sum(b.bytes for b in by_category["optimizer state"]) == state
    # Each update divides by sqrt(exp_avg_sq) / sqrt(1 - beta2 ** step) + eps: the root and the quotient are both alive
    # when the number to divide by has been made a tensor, as float64 and then float32. Largest for the first weight,
    # which comes first, so that no other quotient is around.
    assert memory.peak_bytes == state + W1 + W1 + 8 + 4


def test_a_later_step_of_adamw_needs_room_for_two_updates_only(model: nn.Sequential) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train(model, optimizer)
    with measure(model, optimizer) as memory:
        optimizer.step()
    assert memory.peak_bytes == W1 + W1 + 8 + 4
    assert memory.timeline.curve[-1] == 0


def test_a_whole_step_starts_by_freeing_the_gradients(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    with measure(model, optimizer) as memory:
        train(model, optimizer, steps=2)
    gradients = W1 + B1 + W2 + B2
    batch = B * I * F32 + OUT
    # Highest in the ReLU's backward again, now with the batch, and less the gradients that were there at entry.
    assert memory.peak_bytes == batch + 3 * HIDDEN + W2 + B2 + OUT + 4 - gradients
    assert memory.timeline.freed_from_entry(memory.timeline.peak_index) == gradients
    assert memory.timeline.curve[-1] == 0


def test_backward_alone_frees_what_the_forward_saved(model: nn.Sequential) -> None:
    x, y = torch.rand(B, I), torch.rand(B, O)
    loss = F.mse_loss(model(x), y)
    with measure(model) as memory:
        loss.backward()
    assert allocated(memory) == BACKWARD
    # Saved before entry and freed: the ReLU's result, and the prediction, which mse_loss saved.
    assert memory.timeline.freed_from_entry(len(memory.stream)) == HIDDEN + OUT
    assert memory.timeline.curve[-1] == W1 + B1 + W2 + B2 - HIDDEN - OUT
    # Highest in the ReLU's backward: its result is from before entry and still there, the prediction is gone. The loss
    # is from before entry too.
    assert memory.peak_bytes == 2 * HIDDEN + W2 + B2 + 4 - OUT


def test_parameters_and_buffers_made_inside_are_called_so() -> None:
    with measure(device="cpu") as memory:
        norm = nn.BatchNorm1d(5)
    # Without the model measure cannot know.
    assert set(memory.timeline.alive_at_peak()) == {"temporaries"}
    model = nn.Sequential()
    with measure(model) as memory:
        model.append(nn.BatchNorm1d(5))
    alive = memory.timeline.alive_at(len(memory.stream) - 1)
    assert sorted((b.category, b.bytes) for b in alive) == [
        ("buffers", 8),  # num_batches_tracked
        ("buffers", 20),  # running_mean
        ("buffers", 20),  # running_var
        ("parameters", 20),
        ("parameters", 20),
    ]
    del norm


# --- the with-block -------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_end() -> None:
    with measure() as memory:
        for name in ("peak_bytes", "timeline", "stream"):
            with pytest.raises(RehearsalError, match=f"{name} is known only when"):
                getattr(memory, name)
        assert str(memory) == "Memory(still measuring)"
    assert (memory.peak_bytes, str(memory)) == (0, "peak 0 B over entry")


def test_print_says_what_the_peak_is_made_of(model: nn.Sequential) -> None:
    x, y = torch.rand(B, I), torch.rand(B, O)
    old = torch.empty(1024)
    with measure(model) as memory:
        del old
        loss = F.mse_loss(model(x), y)
        loss.backward()
        spare = torch.empty(2048)
    assert memory.peak_bytes == 8192 + OUT + W1 + B1 + W2 + B2 - 4096
    lines = str(memory).splitlines()
    assert lines[:12] == [
        "peak 4.85 KiB over entry",
        "alive at the peak:",
        "  gradients           796 B  4 blocks",
        "  activations          72 B  1 block",
        "  temporaries         8 KiB  1 block",
        "  freed since entry  -4 KiB",
        "largest blocks there:",
        "  temporaries  8 KiB  aten::empty",
        "  gradients    560 B  0.weight aten::mm",
        "  gradients    168 B  2.weight aten::mm",
        "  activations   72 B  aten::mse_loss",
        "  gradients     56 B  0.bias aten::sum",
    ]
    assert lines[12:] == ["no `del` of these lowers the peak by 0.1 %: loss, old, spare, x, y"]
    del spare, loss


def test_an_exception_passes_through_and_the_peak_is_there() -> None:
    def work() -> None:
        torch.empty(25)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), measure() as memory:
        work()
    assert memory.peak_bytes == 100


def test_nothing_is_kept_alive() -> None:
    existing = torch.empty(50)
    ends = [weakref.ref(existing)]
    with measure() as memory:
        x = torch.empty(25)
        ends.append(weakref.ref(x))
        del x, existing
        assert [end() for end in ends] == [None, None]
    assert memory.timeline.curve == (100, 0, -200)
    network = nn.Linear(2, 2)
    ends = [weakref.ref(network), weakref.ref(network.weight)]
    with measure(network) as memory:
        network(torch.ones(2)).sum().backward()
    del network
    assert [end() for end in ends] == [None, None]  # though the measurement is still here


def test_marks_change_no_peak(model: nn.Sequential) -> None:
    x = torch.rand(B, I)

    def step(mark: Any) -> None:
        mark("forward")
        y = model(x)
        mark("backward")
        y.sum().backward()
        model.zero_grad()

    peaks = []
    for marked in (False, True):
        with CpuRecorder() as recorder, measure() as memory:
            step(recorder.phase if marked else lambda name: None)
        peaks.append(memory.peak_bytes)
        assert sum(isinstance(event, Mark) for event in memory.stream) == 2 * marked
    # The prediction, its sum and the sum's gradient; and the ReLU's backward as above.
    assert peaks == 2 * [OUT + 4 + 4 + 3 * HIDDEN + W2 + B2]
    assert "in phase backward" in str(memory)


def test_the_inspections_of_a_step_look_at_young_objects_only(model: nn.Sequential) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    searches: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function is gc.get_objects:
            searches.append(frame.f_code.co_name)

    gc.disable()  # a collection makes the next search a full one
    sys.setprofile(note)
    try:
        with measure(model, optimizer):
            train(model, optimizer)
    finally:
        sys.setprofile(None)
        gc.enable()
    # two young generations: for profilers first, for garbage twice, at entry and at each of four moments
    assert searches == ["live_objects"] + ["_list_new_objects"] * 2 * (3 + 4)


@pytest.mark.parametrize("is_held", [False, True])
def test_garbage_is_collected_first_if_it_may_hold_memory(
    model: nn.Sequential, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, optimizer)
    kept = [torch.ones(3), {"a": model[0](torch.ones(2, I)).relu()}]
    collected: list[int] = []

    def step() -> None:
        kept.append(torch.ones(100))

    if not is_held:
        loop: list[Any] = [torch.ones(1000)]
        loop.append(loop)
        del loop
    monkeypatch.setattr(cpu_recorder.gc, "collect", lambda: collected.append(1))
    with measure(model, optimizer) as memory:
        step()
    assert memory.peak_bytes == 400
    assert len(collected) == (not is_held)


def test_garbage_of_before_does_not_lower_the_peak() -> None:
    gc.disable()  # else it might be collected too early for this test to fail
    try:
        loop: list[Any] = [torch.ones(1000)]
        loop.append(loop)
        del loop
        with measure() as memory:
            gc.collect()
            made = torch.ones(100)
        assert memory.peak_bytes == made.nbytes
    finally:
        gc.enable()


def test_one_measure_inside_another() -> None:
    with measure() as outer:
        before = torch.empty(25)
        with measure() as inner:
            del before
            x = torch.empty(50)
            del x
        assert inner.peak_bytes == 200 - 100
        y = torch.empty(10)
        with measure() as second:
            z = torch.empty(5)
    assert inner.timeline.curve == (-100, 100, -100)
    assert second.timeline.curve == (20,)
    assert outer.timeline.curve == (100, 0, 200, 0, 40, 60)
    assert outer.peak_bytes == 200
    del y, z


def test_a_measure_inside_backward_is_refused() -> None:
    x = torch.rand(3, requires_grad=True)
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        with measure():
            pass

    y.register_hook(hook)
    with measure() as outer, pytest.raises(RehearsalError, match="inside a backward pass"):
        y.sum().backward()
    assert outer.peak_bytes > 0


def test_measuring_in_a_thread() -> None:
    peaks: list[int] = []

    def work() -> None:
        x = torch.rand(25, requires_grad=True)
        with measure() as memory:
            x.exp().sum().backward()
        peaks.append(memory.peak_bytes)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    assert peaks[0] == peaks[1] > 100


def test_each_device_has_its_recorder() -> None:
    assert isinstance(make_recorder("cpu"), CpuRecorder)
    assert isinstance(make_recorder("cuda:0"), CudaRecorder)
    for use in (make_recorder, lambda device: measure(device=device).__enter__()):
        with pytest.raises(RehearsalError, match="memory of meta cannot be recorded"):
            use("meta")
