import gc
import random
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import RunPython
from lowtide._torch.cpu_profiler import is_profiler_running
from lowtide.errors import RehearsalError
from lowtide.memory.cpu_recorder import CpuRecorder
from lowtide.memory.events import Allocate, EventStream, Free, Mark
from lowtide.memory.memory_timeline import Timeline
from lowtide.utils.live_objects import live_objects


@pytest.fixture(autouse=True)
def _no_profiler_is_left_running() -> Iterator[None]:
    yield
    assert not is_profiler_running()


def sizes(stream: EventStream) -> list[int | str]:
    """+bytes of each allocation, -bytes of each free, the label of each mark."""
    return [e.label if isinstance(e, Mark) else e.bytes if isinstance(e, Allocate) else -e.bytes for e in stream]


def test_allocations_frees_and_marks_come_in_order_with_their_operator() -> None:
    with CpuRecorder() as recorder:
        a = torch.empty(100, dtype=torch.uint8)
        recorder.mark("first", {"n": 1})
        b = a + a
        address = b.data_ptr()
        recorder.phase("second")
        del a
    assert recorder.stream.events == (
        Allocate(0, 100, recorder.stream.events[0].address, "aten::empty"),
        Mark("first", {"n": 1}),
        Allocate(1, 100, address, "aten::add"),
        Mark("phase", "second"),
        Free(0, 100),
    )
    assert recorder.stream.device == "cpu"


def test_allocations_of_compiled_graphs_are_named_without_the_graphs_hash() -> None:
    with CpuRecorder() as recorder, torch.profiler.record_function("## Call CompiledFxGraph fb5vtq53ul3wkixs ##"):
        a = torch.ones(100)
        storage = torch.UntypedStorage(100)
    ops = [event.op for event in recorder.stream.events if isinstance(event, Allocate)]
    assert ops[-1] == "compiled graph"
    del a, storage


@pytest.mark.parametrize("seed", [0, 1])
def test_twenty_thousand_events_in_the_true_order(seed: int) -> None:
    choose = random.Random(seed)
    held: dict[int, Tensor] = {}
    truth: list[tuple[str, int, int]] = []  # (what, bytes, address), or ("mark", its number, 0)
    with CpuRecorder() as recorder:
        for number in range(20_000):
            chance = choose.random()
            if chance < 0.4 or not held:
                held[number] = torch.empty(choose.randrange(1, 5000), dtype=torch.uint8)
                truth.append(("allocate", held[number].nbytes, held[number].data_ptr()))
            elif chance < 0.75:
                # By index, for a list of the keys would make this quadratic.
                tensor = held.pop(next(iter(held)) if chance < 0.6 else next(reversed(held)))
                truth.append(("free", tensor.nbytes, tensor.data_ptr()))
                del tensor
            else:
                recorder.mark("x", number)
                truth.append(("mark", number, 0))
    blocks = {event.block: event.address for event in recorder.stream if isinstance(event, Allocate)}
    found = [
        ("mark", event.data, 0)
        if isinstance(event, Mark)
        else ("allocate" if isinstance(event, Allocate) else "free", event.bytes, blocks[event.block])
        for event in recorder.stream
    ]
    assert found == truth


def test_temporaries_inside_an_operator_are_seen() -> None:
    x, y = torch.rand(6, 4), torch.rand(6, 4)
    with CpuRecorder() as recorder:
        nn.functional.mse_loss(x, y)
    assert sizes(recorder.stream) == [
        6 * 4 * 4,  # the output, sized for the squared differences before it is reduced to one number
        6 * 4 * 4,  # the squared differences
        8,  # 24, to divide their sum by: a Python number becomes an int64 ...
        4,  # ... and then a float32
        -4,
        -8,
        -6 * 4 * 4,
        -6 * 4 * 4,
    ]


def test_views_and_in_place_operators_allocate_nothing() -> None:
    x = torch.zeros(6, 4)
    with CpuRecorder() as recorder:
        x.view(2, 12)[0].detach().relu_().fill_(3.0)
        x.t()[1:].zero_()
    assert sizes(recorder.stream) == []


def test_growing_a_tensor_allocates_anew_and_then_frees() -> None:
    with CpuRecorder() as recorder:
        x = torch.empty(10, dtype=torch.uint8)
        x.resize_(30)
        x.resize_(20)  # fits where it is
        del x
    assert sizes(recorder.stream) == [10, 30, -10, -30]


def test_memory_of_numpy_and_empty_tensors_are_not_torchs() -> None:
    borrowed = torch.from_numpy(np.zeros(100))
    with CpuRecorder() as recorder:
        torch.from_numpy(np.zeros(1000))
        torch.empty(0)
        del borrowed
    assert sizes(recorder.stream) == []


# --- blocks that existed at entry -----------------------------------------------------------------------------------


def test_the_end_of_an_existing_tensor_lowers_the_level() -> None:
    existing = torch.empty(1000, dtype=torch.uint8)
    view = existing[10:20]
    with CpuRecorder() as recorder:
        x = torch.empty(300, dtype=torch.uint8)
        del existing
        recorder.mark("a view is left")
        del view
        y = torch.empty(500, dtype=torch.uint8)
    assert sizes(recorder.stream) == [300, "a view is left", -1000, 500]
    assert Timeline(recorder.stream).curve == (300, 300, -700, -200)
    del x, y


def test_tensors_that_only_the_graph_holds_are_known_too() -> None:
    x = torch.rand(50, requires_grad=True)
    y = x.exp().sin().sum()  # exp saves its result and sin its input, the same 200 bytes; sum saves nothing
    with CpuRecorder() as recorder:
        y.backward()
    frees = [event.bytes for event in recorder.stream if isinstance(event, Free) and event.block < 0]
    assert frees == [200]
    assert Timeline(recorder.stream).curve[-1] == 0  # + x.grad, - the exponential


def test_sizes_are_right_where_the_profilers_are_stale() -> None:
    # The profiler keeps the sizes of the first recording's blocks, by address, and does not see that they are freed.
    with CpuRecorder():
        first = [torch.empty(1000 + 16 * i, dtype=torch.uint8) for i in range(200)]
    first.clear()
    second = [torch.empty(1000 + 16 * (7 * i % 200), dtype=torch.uint8) for i in range(200)]
    truth = [-tensor.nbytes for tensor in second]
    with CpuRecorder() as recorder:
        while second:
            del second[0]
    assert sizes(recorder.stream) == truth


def test_only_the_tensors_asked_for_are_watched() -> None:
    one, other = torch.empty(10), torch.empty(20)
    with CpuRecorder(watch=[one]) as recorder:
        del one, other
    assert sizes(recorder.stream) == [-40]


def test_recording_keeps_nothing_alive() -> None:
    existing = torch.empty(10)
    ends = [weakref.ref(existing)]
    with CpuRecorder() as recorder:
        inside = torch.empty(10)
        ends.append(weakref.ref(inside))
        storage = weakref.ref(inside.untyped_storage())
        del inside, existing
        assert [end() for end in ends] == [None, None]
        assert storage() is None
    assert sizes(recorder.stream) == [40, -40, -40]


# --- backward, threads, errors --------------------------------------------------------------------------------------


def test_marks_made_in_backward_hooks_are_in_their_places() -> None:
    x = torch.rand(30, requires_grad=True)
    with CpuRecorder() as recorder:
        y = x.exp()  # 120 bytes, saved
        y.register_hook(lambda grad: recorder.mark("before exp's backward"))
        y.backward(torch.ones(30))  # 120 for the ones, 120 for y's gradient times y
        del y
    # Autograd clones what it is given for x.grad only if someone else holds it; the product is nobody else's.
    assert sizes(recorder.stream) == [120, 120, "before exp's backward", 120, -120, -120]


def test_a_step_records_the_same_with_marks_and_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
    x = torch.rand(5, 8)

    def record(marked: bool) -> EventStream:
        with CpuRecorder() as recorder:
            hooks = [m.register_forward_hook(lambda *_: recorder.mark("module", object())) for m in model if marked]
            model(x).square().mean().backward()
            for hook in hooks:
                hook.remove()
            model.zero_grad()
        return recorder.stream

    record(False)
    plain, marked = record(False), record(True)
    assert sum(isinstance(event, Mark) for event in marked) == len(model)
    assert [size for size in sizes(marked) if size != "module"] == sizes(plain)
    assert Timeline(marked).peak_bytes == Timeline(plain).peak_bytes > 0


def test_a_thread_can_record_by_itself() -> None:
    found: list[list[int | str]] = []

    def work() -> None:
        with CpuRecorder() as recorder:
            x = torch.empty(7, dtype=torch.uint8)
            recorder.mark("here")
            del x
        found.append(sizes(recorder.stream))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[7, "here", -7]]


def test_nothing_is_printed_where_a_thread_makes_the_first_recording(run_python: RunPython) -> None:
    lines = """
import threading, torch, lowtide
def record():
    with lowtide.measure():
        torch.ones(4)
thread = threading.Thread(target=record)
thread.start()
thread.join()
"""
    done = run_python("-c", lines)
    assert done.returncode == 0
    assert not done.stderr


def test_a_second_recording_at_the_same_time_is_refused() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            CpuRecorder().__enter__()
        except RehearsalError as error:
            errors.append(error)

    with CpuRecorder() as recorder:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(RehearsalError, match="records already"):
            CpuRecorder().__enter__()
        torch.empty(5, dtype=torch.uint8)
    assert len(errors) == 1
    assert sizes(recorder.stream) == [5, -5]


def test_marks_where_the_profiler_does_not_look_are_not_lost_in_silence() -> None:
    recorder = CpuRecorder()

    def work(*raised: Exception) -> None:
        with recorder:
            thread = threading.Thread(target=recorder.mark, args=("elsewhere",))
            thread.start()
            thread.join()
            for error in raised:
                raise error

    with pytest.raises(RehearsalError, match="first 'elsewhere'"):
        work()
    recorder = CpuRecorder()
    with pytest.raises(ZeroDivisionError):  # but never in place of the user's own exception
        work(ZeroDivisionError())


def test_another_profiler_is_left_alone() -> None:
    with torch.profiler.profile(profile_memory=True) as other:
        with pytest.raises(RehearsalError, match="another profiler is running"):
            CpuRecorder().__enter__()
        torch.empty(5)
    assert any(event.key == "aten::empty" for event in other.key_averages())
    with CpuRecorder() as recorder:  # and after it all is well
        torch.empty(5, dtype=torch.uint8)
    assert sizes(recorder.stream) == [5, -5]


@pytest.mark.parametrize("acc_events", [False, True])
def test_a_profiler_that_warms_up_is_left_alone(acc_events: bool) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    counted = []
    with torch.profiler.profile(
        schedule=schedule, acc_events=acc_events, on_trace_ready=lambda p: counted.append(len(p.key_averages()))
    ) as other:
        for _ in range(2):  # the second time around an accumulating profiler prepares the same inner one again
            with CpuRecorder():  # it waits
                pass
            other.step()
            with pytest.raises(RehearsalError, match="another profiler is warming up"):
                CpuRecorder().__enter__()
            other.step()
            torch.empty(5)
            other.step()
    assert len(counted) == 2
    with CpuRecorder():
        pass


def test_a_recording_cannot_begin_inside_backward() -> None:
    x = torch.rand(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: CpuRecorder().__enter__() and None)
    with pytest.raises(RehearsalError, match="inside a backward pass"):
        y.sum().backward()


def test_an_exception_passes_through_and_what_came_before_it_is_there() -> None:
    def work() -> None:
        x = torch.empty(5, dtype=torch.uint8)
        raise ZeroDivisionError(x)

    recorder = CpuRecorder()
    with pytest.raises(ZeroDivisionError), recorder:
        work()
    assert sizes(recorder.stream) == [5]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "left_open", ["lowtide.measure()", "torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])"]
)
def test_a_profiler_that_is_left_running_does_not_crash_the_exit(run_python: RunPython, left_open: str) -> None:
    lines = f"import torch, lowtide, lowtide.memory.cpu_recorder\n{left_open}.__enter__()\nprint(torch.ones(9).sum())"
    ended = run_python("-c", lines)
    assert (ended.returncode, ended.stdout) == (0, "tensor(9.)\n")


def test_misuse_is_said() -> None:
    recorder = CpuRecorder()
    with pytest.raises(RehearsalError, match=r"mark\('x'\)"):
        recorder.mark("x")
    with pytest.raises(RehearsalError, match="ended"):
        _ = recorder.stream
    with recorder:
        pass
    assert recorder.stream.events == ()
    with pytest.raises(RehearsalError, match="was used before"):
        recorder.__enter__()


def test_flush_goes_on_without_a_gap() -> None:
    with CpuRecorder() as recorder:
        x = torch.empty(5, dtype=torch.uint8)
        recorder.mark("one")
        assert sizes(recorder.flush()) == [5, "one"]
        y = torch.empty(6, dtype=torch.uint8)
        del x
        recorder.mark("two")
        assert len(recorder.flush()) == 5
        del y
        assert gc.isenabled()
    assert sizes(recorder.stream) == [5, "one", 6, -5, "two", -6]


def test_gradients_that_only_parameters_hold_lower_the_level_when_they_are_freed():
    model = torch.nn.Linear(512, 512)
    model(torch.randn(4, 512)).sum().backward()
    with CpuRecorder() as recorder:
        model.zero_grad()
    assert Timeline(recorder.stream).curve[-1] == -4 * (512 * 512 + 512)


def test_the_allocator_warns_of_nothing_in_recording_after_recording(capfd):
    for _ in range(60):
        before = [torch.ones(1) for _ in range(24)]
        with CpuRecorder(watch=()):
            after = [torch.empty(1) for _ in range(50)]
            del before
        del after
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", [torch.Tensor, torch.UntypedStorage])
def test_a_recording_holds_no_memory_of_its_own(kind: type):
    gc.collect()
    before = {id(obj) for obj in live_objects(kind)}
    with CpuRecorder():
        assert {id(obj) for obj in live_objects(kind)} <= before
