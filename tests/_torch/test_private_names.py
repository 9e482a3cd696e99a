"""That the private names of torch in `lowtide._torch` exist and do what Lowtide relies on."""

import contextlib
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.autograd.profiler import profile
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import _sharding_prop
from torch.utils import checkpoint

from conftest import RunPython
from lowtide import absent_processes
from lowtide._torch import (
    backward,
    checkpointed_functions,
    compiled_code,
    cpu_profiler,
    cuda_history,
    distributed,
    fake_modes,
    fsdp,
    inductor,
    joint_graph,
    modes,
    modules,
    nodes,
    operators,
    optim,
    privateuse1,
    tensors,
)
from lowtide.runtime.call_interceptor import OuterInterceptor
from lowtide.runtime.saved_values import native

# --- tensors and their memory ---------------------------------------------------------------------------------------


def test_set_version() -> None:
    x = torch.ones(2)
    view = x.add_(1)[:1]
    tensors.set_version(x, 0)
    assert (x._version, view._version) == (0, 0)
    view.add_(1)
    assert x._version == 1


def test_a_storage_has_one_number() -> None:
    x, y = torch.ones(2), torch.ones(2)
    numbers = [tensors.get_storage_number(each.untyped_storage()) for each in (x, x[1:], x.detach(), y)]
    assert numbers[0] == numbers[1] == numbers[2] == tensors.get_storage_id(x) != numbers[3]


def test_a_tensor_as_another_kind_has_the_same_memory() -> None:
    class Own(torch.Tensor):
        pass

    x = torch.ones(2)
    own = tensors.as_kind(Own, x)
    assert type(own) is Own
    assert own.data_ptr() == x.data_ptr()
    assert isinstance(own + 1, Own)
    with modes.without_subclasses():
        assert not isinstance(own + 1, Own)


def test_is_cuda_reaches_function_modes_as_the_getter() -> None:
    asked = []

    class Asking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with Asking():
        assert not torch.ones(2).is_cuda
    assert tensors.IS_CUDA in asked


def test_a_context_for_a_gpu_does_nothing_without_what_sets_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in privateuse1.CUDA_EXCHANGES:
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    with torch.cuda.device(0):
        pass
    assert callable(getattr(torch.cuda, privateuse1.CUDA_INIT))


def test_hooks_on_tensors_and_on_modules_are_detected() -> None:
    w, layer = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
    seen = (tensors.has_gradient_hooks(w), tensors.has_accumulation_hooks(w), modules.has_backward_hooks(layer))
    assert seen == (False, False, False)
    w.register_hook(lambda grad: None)
    assert (tensors.has_gradient_hooks(w), tensors.has_accumulation_hooks(w)) == (True, False)
    w.register_post_accumulate_grad_hook(lambda w: None)
    assert tensors.has_accumulation_hooks(w)
    for register in (layer.register_full_backward_hook, layer.register_full_backward_pre_hook):
        handle = register(lambda *args: None)
        assert modules.has_backward_hooks(layer)
        handle.remove()
        assert not modules.has_backward_hooks(layer)


def test_all_batch_norms_and_convolutions_are_of_one_kind() -> None:
    norms = (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2))
    assert all(isinstance(norm, modules.BatchNorm) for norm in norms)
    assert all(isinstance(c, modules.Convolution) for c in (nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)))


def test_other_owners_of_a_tensors_memory_are_counted() -> None:
    x = torch.ones(4)
    assert tensors.has_one_owner(x)
    view = x[:2]
    assert not tensors.has_one_owner(x)
    del view
    assert tensors.has_one_owner(x)
    with torch.enable_grad():
        graph = x * torch.ones(4, requires_grad=True)
    assert not tensors.has_one_owner(x)
    del graph
    assert tensors.has_one_owner(x)


def test_references_tell_one_holder_from_two() -> None:
    def of(make: Callable[[], torch.Tensor], holder: Callable[[torch.Tensor], object]) -> tuple[int, ...]:
        x = make()
        held = holder(x)
        found = tensors.references((x, object()))
        del held
        return found

    def fresh() -> torch.Tensor:
        return torch.ones(4, requires_grad=True).exp()

    alone = of(fresh, lambda x: None)
    assert alone == of(fresh, lambda x: None)
    holders: list[Callable[[torch.Tensor], object]] = [
        lambda x: x,
        lambda x: [x],
        lambda x: x.detach(),
        lambda x: x[:2],
        lambda x: x.untyped_storage(),
        lambda x: x.sin(),  # a graph
    ]
    assert all(of(fresh, holder) != alone for holder in holders)


def test_held_by_python() -> None:
    x = torch.ones(2, requires_grad=True).exp()
    both = [x.sin()]  # its graph holds x
    both.append(x)
    with_variable = tensors.held_by_python(both, 1, 1)  # not inside an assert: pytest keeps what it asserts on
    del x
    found = [tensors.held_by_python(both, index, 1) for index in range(2)]
    assert with_variable
    assert found == [False, False]


def test_a_wrapper_has_a_shape_and_no_memory() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(function)

    made = tensors.wrapper(Empty, (3, 2), torch.bfloat16, torch.device("cpu"))
    assert (made.shape, made.dtype) == ((3, 2), torch.bfloat16)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        made.untyped_storage().data_ptr()


def test_exchanged_parameters_keep_their_identity() -> None:
    with torch.device("meta"):
        layer = torch.nn.LSTM(4, 4)
    held = layer.weight_ih_l0
    with fake_modes.fake_mode(), torch.no_grad():
        fake = torch.empty(16, 4)
    fake_modes.make_parameter(fake, True)
    tensors.exchange(held, fake)
    assert held is layer.weight_ih_l0
    assert isinstance(held, torch.nn.Parameter)
    assert (fake_modes.is_fake(held), held.device.type, held.requires_grad) == (True, "cpu", True)
    tensors.exchange(held, fake)
    assert (type(held), held.device.type) == (torch.nn.Parameter, "meta")


def test_the_lstm_of_onednn_saves_a_workspace_behind_its_results() -> None:
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor, lambda tensor: tensor
    ):
        result, _ = torch.nn.LSTM(8, 8)(torch.ones(4, 2, 8, requires_grad=True))
    if result.grad_fn.name() == nodes.WITH_WORKSPACE:  # which processors without oneDNN lack
        assert nodes.is_workspace(packed[-1], packed[-2].grad_fn.name())
        assert not nodes.is_workspace(packed[-2], packed[-2].grad_fn.name())


def test_hooks_are_shared() -> None:
    one, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[str] = []
    one.register_hook(lambda grad: seen.append("gradient"))
    one.register_post_accumulate_grad_hook(lambda tensor: seen.append("accumulated"))
    tensors.share_hooks(one, other)
    other.sum().backward()
    assert seen == ["gradient", "accumulated"]


# --- autograd nodes -------------------------------------------------------------------------------------------------


def test_has_yet_to_save() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.grad_fn is not None
        seen.append(nodes.has_yet_to_save(tensor.grad_fn, "_saved_result"))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        y = x.relu()
        y.square()
        torch.autograd.grad(y.sum(), x)
        y.square()
    assert seen == [True, False, False]
    assert not nodes.has_yet_to_save(x.relu().grad_fn, "_saved_result")


def test_raw_saved_gives_tensors_and_runs_no_hook() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    assert y.grad_fn is not None
    assert [saved.data_ptr() for saved in nodes.raw_saved(y.grad_fn)] == [y.data_ptr()]
    y.sum().backward()
    assert list(nodes.raw_saved(y.grad_fn)) == [None]

    def unpack(packed: object) -> torch.Tensor:
        raise AssertionError

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: "packed", unpack):
        z = x.exp()
    assert z.grad_fn is not None
    assert list(nodes.raw_saved(z.grad_fn)) == ["packed"]


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
    assert [saved.tolist() for saved in nodes.raw_saved(y.grad_fn)] == [[1, 1, 1]]
    y.sum().backward()
    assert list(nodes.raw_saved(y.grad_fn)) == []


def test_slots_have_names_and_nodes_are_numbered_in_order() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    y = x.exp()
    z = torch.stack([y, y]) @ y
    assert y.grad_fn is not None
    assert z.grad_fn is not None
    assert [(name, slot.unpack_hook) for name, slot in nodes.find_saved_slots(y.grad_fn)] == [("result", None)]
    assert nodes.sequence_number(y.grad_fn) < nodes.sequence_number(z.grad_fn)
    leaf = y.grad_fn.next_functions[0][0]
    assert leaf is not None
    assert nodes.sequence_number(leaf) == 2**64 - 1


def test_next_sequence_number() -> None:
    first = nodes.next_sequence_number()
    y = torch.ones(2, requires_grad=True).exp()
    assert y.grad_fn is not None
    assert first <= nodes.sequence_number(y.grad_fn) < nodes.next_sequence_number()


# --- modules --------------------------------------------------------------------------------------------------------


def test_a_function_mode_is_left_out() -> None:
    class One(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Other(One):
        pass

    seen: list[object] = []
    x = torch.ones(2)
    with One():
        with modules.without_function_mode(One):
            x.exp()
        assert not seen
        with modules.without_function_mode(Other):
            x.exp()
        x.sin()
    assert len(seen) == 2


# --- compiled code --------------------------------------------------------------------------------------------------


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_compiled_modules_are_recognized() -> None:
    module, linear = Doubled(), torch.nn.Linear(2, 2)
    for each in (module, linear):
        assert compiled_code.is_compiled(torch.compile(each, backend="eager"))  # type: ignore[arg-type]
        assert not compiled_code.is_compiled(each)
        each.compile(backend="eager")
    n_compiled = compiled_code.n_compiled()
    linear(torch.ones(2, 2))  # torch 2.13 leaves its own layers alone in their place, 2.15 does not
    compiles_own_layers = compiled_code.n_compiled() > n_compiled
    assert compiled_code.is_compiled(linear) == compiles_own_layers
    module(torch.ones(2, 2))
    assert compiled_code.n_compiled() == n_compiled + compiles_own_layers + 1
    assert compiled_code.is_compiled(module)
    plan = OuterInterceptor(module, lambda inner, args, kwargs: inner(*args, **kwargs))
    assert compiled_code.is_compiled(module)
    plan.remove()
    del module.__dict__[modules.CALL]
    OuterInterceptor(module, lambda inner, args, kwargs: inner(*args, **kwargs))
    assert not compiled_code.is_compiled(module)


def test_compiled_functions_are_recognized() -> None:
    assert compiled_code.is_compiled_function(torch.compile(torch.sin, backend="eager"))
    assert not compiled_code.is_compiled_function(torch.sin)


def test_settings_that_prevent_plans_are_found() -> None:
    assert not [*inductor.hindrances()]
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert "activation_memory_budget is 0.5" in next(inductor.hindrances())


@pytest.mark.slow
def test_a_partitioner_gets_each_graph_and_calls_of_graphs_are_noted() -> None:
    seen: list[joint_graph.JointGraph] = []
    calls: list[tuple[str, int, bool]] = []
    products: list[tuple[int, ...]] = []

    class Noting(CustomPartitionerFn):
        def uuid(self) -> str:
            return "noting"

        def __call__(self, gm: Any, joint_inputs: Any, **settings: Any) -> Any:
            def choose(graph: joint_graph.JointGraph, plain: frozenset[int]) -> frozenset[int]:
                seen.append(graph)
                return plain

            return joint_graph.partitioned(gm, joint_inputs, choose, **settings)

    function = torch.compile(lambda x, w: torch.tanh(x @ w).sum())
    x, w = torch.ones(8, 4), torch.ones(4, 4, requires_grad=True)
    with (
        inductor.always_partitioned(),
        inductor.partitioning_by(Noting()),
        inductor.watched_calls(lambda what, number, is_backward, sizes: calls.append((what, number, is_backward))),
        inductor.watched_products(products.append),
    ):
        function(x, w).backward()
    assert calls == [("enter", 0, False), ("leave", 0, False), ("enter", 0, True), ("leave", 0, True)]
    assert products == [(4 * 8 * 4, 4 * 4 * 4), (), (4 * 4 * 8, 4 * 8 * 4), ()]
    (graph,) = seen
    assert [node.target for node in graph.nodes if node.flops] == ["aten.mm", "aten.mm"]
    assert [node.flops for node in graph.nodes if node.flops] == [2 * 8 * 4**2] * 2
    assert torch._inductor.config.custom_partitioner_fn is None


def test_code_that_is_not_compiled_alone() -> None:
    graphs: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    @compiled_code.not_compiled_alone
    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x.exp()).sin()

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    def around(x: torch.Tensor) -> torch.Tensor:
        return outer(x) + 1

    torch.compile(outer, backend=backend)(torch.ones(2))
    assert [node.name for node in graphs[0].graph.nodes if node.op == "call_method"] == ["cos"]  # type: ignore[attr-defined]
    torch.compile(around, backend=backend)(torch.ones(2))
    assert [node.name for node in graphs[1].graph.nodes if node.op == "call_method"] == ["exp", "cos", "sin"]  # type: ignore[attr-defined]


def test_compiled_code_is_split_at_functions_that_it_has_to_call_each_time() -> None:
    calls = list[object]()

    @compiled_code.called_between_graphs
    def hook(x: torch.Tensor) -> None:
        calls.append(x)
        inner()

    def inner() -> None:
        assert not compiled_code.is_traced()

    def around(x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        hook(x)
        return x.sin()

    x = torch.ones(2)
    compiled = torch.compile(around, backend="eager")
    assert torch.equal(compiled(x), around(x))
    compiled(x)
    assert len(calls) == 3
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Lowtide watches updates"):
        torch.compile(around, backend="eager", fullgraph=True)(x)


@pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context"), reason="this torch sets its flag during export only"
)
def test_traced_code_is_distinguished_from_code_that_runs_during_compilation() -> None:
    tests = (compiled_code.is_traced, compiled_code.is_compiling_anywhere, compiled_code.is_compiling_here)
    seen: list[list[bool]] = []

    def backend(graph: Any, inputs: object) -> Any:
        seen.append([test() for test in tests])
        return graph.forward

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if compiled_code.is_traced() else x

    x = torch.ones(2)
    assert torch.equal(torch.compile(function, backend=backend, fullgraph=True)(x), x.sin())
    assert seen == [[False, True, True]]
    assert [test() for test in tests] == [False, False, False]


def test_a_hook_that_compiled_code_has_called_is_not_compiled() -> None:
    def shown(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @compiled_code.never_compiled
    def hidden(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def n_compiled(pack: Callable[[torch.Tensor], torch.Tensor]) -> int:
        torch._dynamo.reset()

        @torch._dynamo.disable(recursive=False)
        def left_out(x: torch.Tensor) -> torch.Tensor:
            return x.exp()

        def outer(x: torch.Tensor) -> torch.Tensor:
            return left_out(x).sin()

        before = counters["frames"]["total"]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            torch.compile(outer, backend="aot_eager")(torch.ones(2, requires_grad=True))
        return counters["frames"]["total"] - before

    assert n_compiled(hidden) == n_compiled(shown) - 1


def test_compiled_code_releases_saved_tensors_after_reading_them() -> None:
    seen: list[tuple[str, bool]] = []

    class Handle:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            weakref.finalize(self, lambda: seen.append(("gone", True)))

    def unpack(handle: Handle) -> torch.Tensor:
        seen.append(("read", compiled_code.in_compiled_backward()))
        return handle.tensor

    def run(function: Any) -> None:
        seen.clear()
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(Handle, unpack):
            y = function(x)
        y.sum().backward()

    run(torch.exp)
    assert seen == [("read", False), ("gone", True)]
    run(torch.compile(torch.exp, backend="aot_eager"))
    assert seen == [("read", True), ("gone", True)]
    assert not compiled_code.in_compiled_backward()


# --- backward -------------------------------------------------------------------------------------------------------


def test_in_backward() -> None:
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(backward.in_backward()))
    assert not backward.in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not backward.in_backward()


def test_the_running_node_is_the_one_that_reads() -> None:
    seen: list[int] = []
    kinds: list[str] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(backward.get_running_node_number())
        kinds.append(backward.get_running_node_name())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack):
        x = torch.ones(2, requires_grad=True)
        y = x * x
    assert y.grad_fn is not None
    number = nodes.sequence_number(y.grad_fn)
    y.sum().backward()
    assert seen == [number, number]
    assert kinds == ["MulBackward0"] * 2
    assert (backward.get_running_node_number(), backward.get_running_node_name()) == (-1, "")


def test_kernel_overrides_run_only_inside_their_block() -> None:
    calls = []

    def kernel(on: Callable[..., Any], past: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        *args, mine = args  # type: ignore[assignment]
        calls.append((len(args), type(mine), kwargs))
        with privateuse1.below_autograd():
            assert torch.equal(past(*args, **kwargs), on(*args, **kwargs))
        return on(*args, **kwargs)

    x = torch.linspace(-4, 4, 8, requires_grad=True)

    def gradient(*, create_graph: bool = False) -> torch.Tensor:
        return torch.autograd.grad(nn.functional.hardswish(x).sum(), x, create_graph=create_graph)[0]

    plain, second = gradient(), torch.autograd.grad(gradient(create_graph=True).sum(), x)[0]
    override = privateuse1.OverrideKernel("hardswish_backward", kernel, x.nbytes + 1, native and native.Gate)
    with privateuse1.with_overrides():
        assert torch.equal(gradient(), plain)  # its gradient is smaller
    override.let_pass(x.nbytes)
    assert torch.equal(gradient(), plain)
    assert calls == []
    with privateuse1.with_overrides():
        assert torch.equal(gradient(), plain)
        assert torch.equal(torch.autograd.grad(gradient(create_graph=True).sum(), x)[0], second)
        with privateuse1.without_overrides():
            gradient()
        assert calls[0] == (2, object, {})
        assert len(calls) == 2
        thread = threading.Thread(target=gradient)
        thread.start()
        thread.join()
        assert len(calls) == 2
    gradient()
    assert len(calls) == 2
    override.remove()
    with privateuse1.with_overrides():
        assert torch.equal(gradient(), plain)
    assert len(calls) == 2


def test_a_tensor_with_bits_of_its_own_or_under_a_mode_is_not_dispatched_plainly() -> None:
    tensor = torch.ones(2)
    assert privateuse1.is_dispatched_plainly(tensor)
    assert not privateuse1.is_dispatched_plainly(torch.ones(2, dtype=torch.complex64).conj())
    assert not privateuse1.is_dispatched_plainly(torch.ones(2, dtype=torch.complex64).conj().imag)
    assert not privateuse1.is_dispatched_plainly(torch._efficientzerotensor(2))
    with modes.TorchDispatchMode():
        assert not privateuse1.is_dispatched_plainly(tensor)
    assert torch.func.vmap(lambda row: row * privateuse1.is_dispatched_plainly(row))(tensor).sum() == 0


def test_a_kernel_registered_by_other_code_is_detected() -> None:
    assert not privateuse1.is_replaced("mish_backward", "CPU")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("mish_backward", lambda *args: None, "CPU")
    assert privateuse1.is_replaced("mish_backward", "CPU")
    privateuse1.remove_kernels(library)
    assert not privateuse1.is_replaced("mish_backward", "CPU")


def test_forward_mode_is_seen() -> None:
    assert not backward.in_forward_mode()
    with torch.autograd.forward_ad.dual_level():
        assert backward.in_forward_mode()
    assert not backward.in_forward_mode()


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_trace_is_seen() -> None:
    found: list[bool] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        found.append(backward.is_tracing())
        return x + 1

    torch.jit.trace(traced, torch.zeros(2), check_trace=False)
    traced(torch.zeros(2))
    assert found == [True, False]


def test_the_engine_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    engine = getattr(torch.autograd, backward.ENGINE)

    def run(outputs: object, *args: object, **kwargs: object) -> object:
        seen.append(args[1:3])
        return engine(outputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, backward.ENGINE, run)
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward(retain_graph=True)
    torch.autograd.grad((x * 2).sum(), x)
    assert seen == [(True, False), (False, False)]


def test_backward_is_called_from_one_place() -> None:
    frames = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: frames.append(sys._getframe(1).f_code))
    x.sum().backward()
    assert frames == [backward.BACKWARD_CALL]


# --- optimizers, clipping and gradient scalers ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam])
def test_a_step_without_hooks(kind: type[torch.optim.Optimizer]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = kind([weight], lr=0.1)  # type: ignore[call-arg]
    ran: list[object] = []
    assert not optim.has_step_pre_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda *_: ran.append(1))
    assert optim.has_step_pre_hooks(optimizer)
    optim.find_unhooked_step(optimizer)()
    assert not ran
    assert not torch.equal(weight, torch.ones(3))


def test_the_clipped_gradients_are_found() -> None:
    weights = [torch.nn.Parameter(torch.ones(n)) for n in (1, 2, 3)]
    for weight in weights[:2]:
        weight.grad = torch.ones_like(weight)
    found: list[list[int]] = []

    def watch(frame: Any, event: str, argument: object) -> None:
        if event == "return" and frame.f_code.co_name in ("clip_grad_norm_", "clip_grad_value_"):
            found.append([gradient.numel() for gradient in optim.clipped(frame.f_locals)])

    sys.setprofile(watch)
    try:
        torch.nn.utils.clip_grad_norm_(iter(weights), 1.0)
        torch.nn.utils.clip_grad_value_(iter(weights), 1.0)
    finally:
        sys.setprofile(None)
    assert found == [[1, 2], [1, 2]]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
def test_norms_one_by_one_add_up_to_the_one_that_gradients_are_clipped_by(
    norm_type: float, foreach: bool | None
) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (3, 70, 700)]
    parameters.insert(1, torch.nn.Parameter(torch.randn(5, dtype=torch.float64)))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    norms = {p: optim.compute_norm(p.grad, norm_type, foreach) for p in parameters if p.grad is not None}
    grouped = optim.as_grouped(parameters)
    assert sorted(map(id, grouped)) == sorted(map(id, parameters))
    found = torch.linalg.vector_norm(torch.stack([norms[p].to(parameters[0].device) for p in grouped]), norm_type)
    assert torch.equal(found, torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type, foreach=foreach))


def test_scaler_stages() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    before = optim.read_scaler_stages(scaler)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    optim.set_scaler_stages(scaler, before)
    scaler.unscale_(optimizer)


# --- operators ------------------------------------------------------------------------------------------------------


def test_the_tensor_arguments_of_an_op() -> None:
    assert ("self", "mat1", "mat2") in operators.list_tensor_arguments("addmm")
    assert operators.list_tensor_arguments("no_such_op") == ()


def test_properties_of_operators_are_read_from_their_schema() -> None:
    aten = torch.ops.aten
    assert operators.changes_geometry(aten.t_.default)
    assert not operators.changes_geometry(aten.add_.Tensor)
    assert operators.draws(aten.bernoulli_.float)
    assert not operators.draws(aten.add_.Tensor)
    assert operators.find_written_arguments(aten.add_.Tensor) == (0,)
    assert operators.find_written_arguments(aten.add.out) == ("out",)
    assert operators.find_written_arguments(aten.add.Tensor) == ()


# --- the profiler, on CPU -------------------------------------------------------------------------------------------


def test_the_profiler_reports_allocations_between_annotations(capfd: pytest.CaptureFixture[str]) -> None:
    assert not cpu_profiler.is_profiler_running()
    with profile(profile_memory=True) as profiler:
        assert cpu_profiler.is_profiler_running()
        assert not cpu_profiler.is_warming_up(profiler)
        annotation = cpu_profiler.RecordFunction("here")
        annotation.__enter__()
        annotation.__exit__(None, None, None)
        x = torch.empty(25)
        address = x.data_ptr()
        del x
    assert not cpu_profiler.is_profiler_running()
    here, empty, free = cpu_profiler.get_profiler_roots(profiler)
    assert (here.name, empty.name, free.name) == ("here", "aten::empty", cpu_profiler.ALLOCATION)
    assert here.start_time_ns < empty.start_time_ns < free.start_time_ns
    (allocation,) = empty.children
    assert (allocation.name, allocation.extra_fields.alloc_size) == (cpu_profiler.ALLOCATION, 100)
    assert (free.extra_fields.alloc_size, free.extra_fields.device.type) == (-100, "cpu")
    assert allocation.extra_fields.ptr == free.extra_fields.ptr == address


# --- several processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group that outlives what the test makes: torch 2.13 hangs now and then where a wrapper is the last."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there, which names the rank
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


def test_collective_operations_are_counted_and_wrappers_say_what_they_know(one_process: None) -> None:
    before = distributed.count_collectives()
    torch.distributed.all_reduce(torch.zeros(1))
    assert distributed.count_collectives() == before + 1
    for is_static in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        wrapper = nn.parallel.DistributedDataParallel(model, static_graph=is_static)
        awaits, new_buckets = [], []
        for _ in range(3):
            awaits.append(distributed.awaits_first_backward(wrapper))
            new_buckets.append(distributed.has_new_buckets(wrapper))
            wrapper(torch.zeros(1, 4)).sum().backward()
        assert awaits == [is_static, False, False]
        assert is_static or new_buckets == [False, False, True]


def test_wrappers_say_what_shares_a_bucket(one_process: None) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 600))
    wrapper = nn.parallel.DistributedDataParallel(model)
    parameters, sparse = distributed.find_sent_parameters(wrapper)
    assert parameters == [*model.parameters()]
    assert sparse == [False] * 4
    first, then = distributed.compute_bucket_limits(wrapper)
    assert then == [2**20, 25 * 2**20]
    assert distributed.assign_buckets(parameters, first, sparse, range(4)) == [[0, 1, 2, 3]]
    backwards = distributed.assign_buckets(parameters[::-1], then, sparse, [3, 2, 1, 0])
    assert backwards == [[3, 2], [1, 0]]  # the first is full with 1 MiB
    capped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1, find_unused_parameters=True)
    assert distributed.compute_bucket_limits(capped) == ([2**20], [2**20, 2**20])
    assert callable(getattr(wrapper, distributed.SYNC_BUFFERS))


def test_a_call_at_the_end_of_backward() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda _: distributed.after_backward(lambda: seen.append(x.grad is not None)))
    (2 * x).sum().backward()
    assert seen == [True]


def test_units_that_are_sharded(one_process: None) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    x = torch.ones(2, 4)
    [group] = fsdp.find_shard_groups(model[0])
    assert group.modules == (model[0],)
    assert not fsdp.find_shard_groups(model), "it has no parameters of its own"
    assert group.is_gathered_in_backward
    assert not group.is_on_host
    for _ in range(2):  # before and after the first forward
        assert group.reshards_after_forward
        assert fsdp.has_default_resharding(model)
        model(x)
        assert not group.is_gathered

    assert not group.sharded_by_gathered
    shards = group.parameters
    group.keep_gathered()
    model(x)
    assert group.is_gathered
    gathered = [group.sharded_by_gathered[id(parameter)] for parameter in model[0].parameters()]
    assert all(shard is other for shard, other in zip(gathered, shards, strict=True))
    ran = model[0]._get_fsdp_state()._comm_ctx.post_forward_order
    before = len(ran)
    with fsdp.as_in_backward(model[0]):
        model[0](x)
    assert group.is_gathered
    assert len(ran) == before > 0
    group.reshard()
    assert not group.is_gathered
    fsdp.forget_step(model[0])  # which is not for it to say
    assert ran
    fsdp.forget_step(model)
    assert not ran

    gather, scatter = group.senders
    group.senders = scatter, gather
    assert group.senders == (scatter, gather)
    group.senders = gather, scatter

    model.set_requires_gradient_sync(False)
    assert not group.has_unsent_gradients
    model(x).sum().backward()
    assert group.has_unsent_gradients
    fsdp.forget_step(model)
    assert not group.has_unsent_gradients
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    gradient = model[1].bias.grad.full_tensor()
    assert torch.equal(gradient, torch.full((4,), 2.0)), "those of the step that was forgotten are in it"


# --- the caching allocator, on CUDA ---------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_allocators_history_carries_our_text() -> None:
    assert not cuda_history.history_is_on()
    cuda_history.start_history()
    assert cuda_history.history_is_on()
    cuda_history.set_metadata("text")
    x = torch.empty(100, dtype=torch.uint8, device="cuda")
    address = x.data_ptr()
    del x
    cuda_history.set_metadata("")
    trace = cuda_history.snapshot()["device_traces"][torch.cuda.current_device()]
    cuda_history.stop_history()
    ours = [(e["action"], e["addr"], e["size"], e["user_metadata"]) for e in trace if e["addr"] == address]
    assert ours == [(action, address, 100, "text") for action in ("alloc", "free_requested", "free_completed")]
    assert all(isinstance(e["time_us"], int) for e in trace)


@pytest.mark.gpu
def test_products_allocate_dropped_workspaces_again() -> None:
    x = torch.ones(64, 64, device="cuda")
    cuda_history.drop_workspaces()  # also those of other threads
    x @ x
    with_them = torch.cuda.memory_allocated()
    cuda_history.drop_workspaces()
    without = torch.cuda.memory_allocated()
    x @ x
    assert without < with_them == torch.cuda.memory_allocated()


# --- fake tensors ---------------------------------------------------------------------------------------------------


def test_a_fake_tensor_has_a_storage_that_ends_with_its_last_reference() -> None:
    with fake_modes.fake_mode():
        x = torch.empty(10, 4)
    assert fake_modes.is_fake(x)
    assert fake_modes.is_strided(x)
    ended: list[bool] = []
    end = weakref.ref(x.untyped_storage(), lambda _: ended.append(True))
    view = x[2:].t()
    assert tensors.get_storage_id(view) == tensors.get_storage_id(x)
    assert x.untyped_storage().nbytes() == 160
    del x
    assert not ended
    del view
    assert ended == [True]
    assert end() is None


def test_a_fake_operator_says_when_it_depends_on_contents() -> None:
    with fake_modes.fake_mode():
        x = torch.ones(3)
        with pytest.raises(fake_modes.DATA_DEPENDENT):
            x.nonzero()
        with pytest.raises(fake_modes.DATA_DEPENDENT):
            x.sum().item()


def test_modes_can_be_left_out() -> None:
    with fake_modes.fake_mode():
        with fake_modes.on_real_tensors():
            assert not fake_modes.is_fake(torch.ones(3))
        with fake_modes.without_modes():
            assert not fake_modes.is_fake(torch.ones(3))
        assert fake_modes.is_fake(torch.ones(3))


# --- the place for devices of other makers --------------------------------------------------------------------------


ON_A_DEVICE_OF_ONES_OWN = """
import torch
from torch.optim import optimizer
from lowtide._torch import backward, compiled_code, cpu_profiler, cuda_history, distributed, fake_modes, fsdp
from lowtide._torch import modes, modules, nodes, operators, optim, privateuse1, tensors
from lowtide.runtime.call_interceptor import OuterInterceptor
from lowtide.runtime.saved_values import native

torch.ones(2, requires_grad=True).sum().backward()  # the engine has its threads before there is another device
assert privateuse1.find_device_place() is None

class Module(privateuse1.DeviceModule):
    def is_available(self):
        return False

    def get_amp_supported_dtype(self):
        return [torch.float16]

privateuse1.take_device_place("mine", Module(), privateuse1.DeviceHook())
assert privateuse1.find_device_place() == "mine"
ran = []
aten = torch.ops.aten

def linear(x, weight, bias=None):
    ran.append("cast")
    with privateuse1.without_autocast():
        return aten.linear(x.half(), weight.half(), bias)

def relu(x):
    ran.append("composed")
    return x.clamp(min=0)

kept = [
    privateuse1.register_kernels({"linear": linear}, privateuse1.AUTOCAST_KEY),
    privateuse1.register_kernels({"relu": relu}, privateuse1.AUTOGRAD_KEY),
    privateuse1.pass_through(privateuse1.AUTOCAST_KEY),
]
mode = fake_modes.fake_mode(run_on_zeros=False)
with mode, privateuse1.constants_made_on_cpu(), torch.autograd.set_multithreading_enabled(False):
    assert torch.tensor([1.0], device="mine").device.type == "mine"
    weight = torch.nn.Parameter(torch.empty(4, 4, device="mine"))
    torch.set_autocast_enabled("mine", True)
    out = torch.nn.functional.linear(torch.relu(weight), weight)
    torch.set_autocast_enabled("mine", False)
    assert (out.dtype, ran) == (torch.float16, ["composed", "cast"])
    out.float().sum().backward()
    assert weight.grad.device.type == "mine"
    try:
        torch.histogram(torch.empty(4, device="mine"), 2)
    except fake_modes.NO_FAKE_KERNEL:
        pass
    else:
        raise AssertionError
    with fake_modes.running_on_zeros(mode):
        assert torch.histogram(torch.empty(4), 2)[0].shape == (2,)
    with privateuse1.foreach_for_fakes():
        assert optimizer._default_to_fused_or_foreach([weight], False) == (False, True)
    assert optimizer._default_to_fused_or_foreach([weight], False) == (False, False)
"""


def test_a_registered_device_is_a_full_device(run_python: RunPython) -> None:
    """In a process of its own: the place is taken once."""
    done = run_python("-c", ON_A_DEVICE_OF_ONES_OWN)
    assert done.returncode == 0, done.stderr


def test_kernels_of_attention_are_switched_on_and_off() -> None:
    assert all(modes.attention_allowed(name) for name in ("cudnn", "flash", "efficient"))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert [modes.attention_allowed(name) for name in ("cudnn", "flash", "efficient")] == [False, True, False]


def test_kernels_of_attention_in_the_order_of_their_names() -> None:
    names = ("flash", "mem_efficient", "math", "cudnn")
    for name, (is_allowed, allow) in zip(names, modes.ATTENTION_KERNELS.values(), strict=True):
        public = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
        allow(False)
        assert (is_allowed(), public()) == (False, False)
        allow(True)
        assert (is_allowed(), public()) == (True, True)


def test_saved_tensor_hooks_are_disabled_in_a_block() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def raises() -> None:
        with modes.saved_tensor_hooks_off(unpack):
            x.exp()
            raise ValueError("in the block")

    x = torch.randn(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        with pytest.raises(ValueError, match="in the block"):
            raises()
        assert packed == []
        with modes.saved_tensor_hooks_off(lambda tensor: tensor):  # these are somebody else's
            x.exp()
        x.exp()
    assert len(packed) == 2
    with modes.saved_tensor_hooks_off(unpack):
        x.exp()
    assert modes.saved_tensor_hooks() is None


@pytest.mark.skipif(
    not hasattr(_sharding_prop, "_select_min_cost_strategy"),
    reason="this torch chooses shardings in another place",
)
def test_like_tensors_of_a_list_are_propagated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's lists are sharded as torch shards them; the time no longer grows with the number of layers."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    n_chosen = 0
    choose = _sharding_prop._select_min_cost_strategy

    def counted(*args: Any) -> Any:
        nonlocal n_chosen
        n_chosen += 1
        return choose(*args)

    monkeypatch.setattr(_sharding_prop, "_select_min_cost_strategy", counted)
    aten = torch.ops.aten
    with absent_processes(4):
        mesh = torch.distributed.init_device_mesh("cpu", (4,))

        def specs(*placements: Any) -> list[Any]:
            shapes = (8, 4), (5,), (8, 4), (8, 4), (5,)
            return [distribute_tensor(torch.ones(shape), mesh, placements)._spec for shape in shapes]

        sharded, whole, factors = specs(Shard(0)), specs(Replicate()), [1.0, 2.0, 3.0, 4.0, 5.0]
        factor = distribute_tensor(torch.ones(()), mesh, [Replicate()])._spec
        settings = {
            **dict.fromkeys(("lr", "beta1", "beta2", "weight_decay", "eps"), 0.1),
            "amsgrad": False,
            "maximize": False,
        }
        for op, args, n in (
            (aten._foreach_add_.List, (sharded, sharded), 2),
            (aten._foreach_mul.ScalarList, (sharded, factors), 2),
            (aten._foreach_norm.Scalar, (sharded, 2), 2),
            (aten._foreach_mul_.Tensor, (sharded, factor), 2),
            (aten._foreach_mul.List, ([*sharded[:3], *whole[3:]], sharded), 9),
            (aten._fused_adamw_.default, (sharded, sharded, sharded, sharded, [], sharded), 2),
        ):
            results, counts = [], []
            propagator = distribute_tensor(torch.ones(8), mesh, [Shard(0)])._op_dispatcher.sharding_propagator
            for propagating in (contextlib.nullcontext(), distributed.sharding_without_modes(lambda tensor: None)):
                info = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy[op]
                schema = _sharding_prop.OpSchema(op, args, settings if op is aten._fused_adamw_.default else {}, info)
                n_chosen = 0
                with propagating:
                    results.append(propagator.propagate_op_sharding_non_cached(schema))
                counts.append(n_chosen)
            assert results[0] == results[1], op
            assert results[0].output_spec is None or len(results[0].output_spec) == 5
            assert counts == [5, n], op


def test_tensors_to_be_waited_for_and_state_of_the_first_process() -> None:
    owner, name, keep = distributed.build_own_state_patch()
    assert callable(getattr(owner, name))
    with absent_processes(2, rank=1):
        sent = distributed.import_functional_collectives().all_reduce(
            torch.ones(2), "sum", torch.distributed.group.WORLD
        )
        assert distributed.is_wrapping(type(sent))
        part = next(tensors.find_parts(sent))
        like = distributed.make_distributed_like(sent, part)
        assert type(like) is type(sent)
        assert next(tensors.find_parts(like)) is part
        own = {"a": torch.ones(2), "b": torch.ones(2, device="meta"), "n": 1}
        sent.wait()
        keep({}, own, torch.device("cpu"), strict=True)
    assert own["a"].tolist() == [1, 1]
    assert own["b"].device.type == "cpu"


def test_a_module_that_is_imported_meanwhile_gets_the_functions_of_checkpointing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of torch.distributed import them by name, and may be imported while checkpointed calls are observed."""
    imported: Any = ModuleType("imported_meanwhile")
    monkeypatch.setitem(sys.modules, "imported_meanwhile", imported)
    names = (checkpointed_functions.GENERATOR, "CheckpointFunction")
    with contextlib.ExitStack() as stack:
        stack.callback(checkpointed_functions.observe_checkpoints(lambda *call: None))
        for name in names:
            setattr(imported, name, getattr(checkpoint, name))
    for name in names:
        assert getattr(imported, name) is getattr(checkpoint, name)


def test_reads_of_attributes_are_told_from_calls_and_from_other_classes() -> None:
    class Kind(torch.Tensor):
        pass

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(tensors.reads_attribute(func, types))
            return func(*args, **(kwargs or {}))

    seen: list[bool] = []
    plain, kind = torch.ones(2), torch.ones(2).as_subclass(Kind)
    with Seeing():
        for read in (plain.grad, nn.Parameter(plain).requires_grad, plain.numel(), kind.layout):
            assert read is not plain
        plain.grad = None
    assert seen == [True, True, False, False, False]
