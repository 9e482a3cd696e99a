"""Graphs: a walk finds every node, computes nothing, and keeps nothing alive beyond its result."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._torch.tensors import get_storage_id
from lowtide.diagnostics.graph import Graph, Node, graph
from lowtide.diagnostics.graph.graph_records import count_unique_bytes
from lowtide.errors import LowtideError
from models import MODELS, build


def line() -> tuple[Tensor, dict[str, Tensor], Graph]:
    """`y = W x + b`, with the graph behind it."""
    names = {"W": torch.randn(3, 4, requires_grad=True), "x": torch.randn(4), "b": torch.randn(3, requires_grad=True)}
    y = names["W"] @ names["x"] + names["b"]
    return y, names, graph(y, names=names | {"y": y})


def node(found: Graph, name: str) -> Node:
    (only,) = (each for each in found.nodes if each.name == name)
    return only


# --- what is found --------------------------------------------------------------------------------------------------


def test_a_line() -> None:
    y, names, found = line()
    multiply, add = found.nodes
    assert (multiply.name, add.name) == ("MvBackward0", "AddBackward0")
    assert [value.name for value in multiply.inputs] == ["W", "x"]
    product, b = add.inputs
    assert (product.producer, product.shape, product.dtype, product.tensor) == (multiply, (3,), "float32", None)
    assert b.name == "b"
    (root,) = found.roots
    assert (root.name, root.producer) == ("y", add)
    assert add.function is y.grad_fn
    assert {leaf.name for leaf in found.leaves} == {"W", "b"}
    assert {constant.name for constant in found.constants} == {"x"}
    assert {leaf.name: leaf.tensor is names[leaf.name] for leaf in found.leaves} == {"W": True, "b": True}


def test_every_value_that_a_node_came_from_can_be_reached() -> None:
    _, names, found = line()
    reached = list(found.upstream(found.nodes[-1]))
    assert [value.name for value in reached] == ["", "b", "W", "x"]
    by_name = {value.name: value.tensor for value in reached if value.tensor is not None}
    assert {name: torch.equal(tensor, by_name[name]) for name, tensor in names.items()} == dict.fromkeys(names, True)
    (w,) = (leaf for leaf in found.leaves if leaf.name == "W")
    assert [consumer.name for consumer in found.consumers(w)] == ["MvBackward0"]


def test_bytes_are_those_of_unique_storages_with_parameters_apart() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 5, bias=False))
    x = torch.randn(7, 10)
    found = graph(model(x).sum(), model=model)
    hidden = 7 * 20 * 4  # kept by the sigmoid as its result and by the second linear as its input
    assert node(found, "SigmoidBackward0").held_bytes == hidden
    assert node(found, "AddmmBackward0").held_bytes == x.nbytes  # the weight's gradient needs it
    assert node(found, "MmBackward0").held_bytes == hidden
    assert node(found, "MmBackward0").parameter_bytes == 5 * 20 * 4
    assert found.held_bytes == hidden + x.nbytes
    assert found.parameter_bytes == 5 * 20 * 4


@pytest.mark.parametrize("name", MODELS)
def test_held_bytes_are_those_that_dropping_the_loss_frees(name: str) -> None:
    """To the byte, for the allocator: the graph, less the batch that it shares with us, and the loss itself."""
    case = build(name)
    ours = {get_storage_id(tensor) for tensor in case.batch.values()}
    with lowtide.measure(case.model):
        loss = case.model(**case.batch).loss
        found = graph(loss, model=case.model)
        kept = (kept for each in found.nodes for kept in each.kept if not kept.parameter and kept.storage not in ours)
        held_bytes = count_unique_bytes(kept)
        del found, kept
        gc.collect()
        with lowtide.measure(case.model) as dropped:
            del loss
    assert dropped.timeline.curve[-1] == -(held_bytes + 4)


def test_a_view_holds_its_whole_storage() -> None:
    large = torch.ones(1000, requires_grad=True) + 1
    found = graph(large[:3].exp().log())
    kept = [kept for each in found.nodes for kept in each.kept if kept.name == "self"]
    assert [(each.shape, each.bytes) for each in kept] == [((3,), 12)]
    found = graph((large[:3] * large[:3]).sum())
    assert found.held_bytes == 4000


def test_modules_are_known_from_the_parameters() -> None:
    case = build("gpt2")
    found = graph(case.model(**case.batch).loss, model=case.model)
    where: dict[str, set[str]] = {}
    for each in found.nodes:
        where.setdefault(each.name, set()).add(each.module)
    blocks = [f"transformer.h.{i}" for i in range(3)]
    assert where["NativeLayerNormBackward0"] == {f"{b}.{n}" for b in blocks for n in ("ln_1", "ln_2")} | {
        "transformer.ln_f"
    }
    assert where["TanhBackward0"] == {f"{block}.mlp" for block in blocks}
    assert where["EmbeddingBackward0"] == {"transformer.wte", "transformer.wpe"}
    assert where["MmBackward0"] == {"lm_head"}  # whose weight is the embedding's
    assert where["NllLossBackward0"] == {""}
    assert sum(found.by_module().values()) == found.held_bytes


def test_inputs_that_torch_forgets_are_counted() -> None:
    found = graph(torch.ones(3, requires_grad=True) + torch.ones(3))
    assert [len(each.inputs) for each in found.nodes] == [1]
    assert found.nodes[0].unrecorded == 1


def test_tensors_held_by_a_custom_function_are_listed() -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.mask = torch.ones(50)
            ctx.variable = None  # the name of what leaves have
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    x = torch.ones(5, requires_grad=True) + 0
    y = Scale.apply(x)
    found = graph(y)
    assert {kept.name: kept.bytes for kept in found.nodes[-1].kept} == {"tensors[0]": 20, "ctx.mask": 200}
    assert found.held_bytes == 220
    y.sum().backward()
    assert {kept.name for kept in graph(y).nodes[-1].kept} == {"ctx.mask"}


def test_gradients_that_can_not_be_differentiated_again_are_one_graph() -> None:
    """Their nodes have no number in the order of forward."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            return inputs[0] + inputs[1]

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 2 * grad, 3 * grad

    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    gradients = []
    for _ in range(2):
        (scale,) = (torch.ones((), requires_grad=True),)
        gradients += torch.autograd.grad((Once.apply(x, y) * scale).sum(), (x, y), create_graph=True)
    assert {gradient.grad_fn.name() for gradient in gradients if gradient.grad_fn is not None} == {
        "torch::autograd::Error"
    }
    assert {node.name for node in graph(gradients).nodes} >= {"torch::autograd::Error"}


def test_several_results_are_one_graph() -> None:
    x = torch.ones(4, requires_grad=True)
    h = x.exp()
    found = graph([h.sin(), h.cos(), x])
    assert [each.name for each in found.nodes] == ["ExpBackward0", "SinBackward0", "CosBackward0"]
    assert found.held_bytes == 16
    assert found.roots[2] is found.leaves[0]
    assert str(found).count("ExpBackward0  keeps") == 1


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: (x * 2).relu_(),
    "into a view": lambda x: (x + 0).index_fill_(0, torch.tensor([0]), 2.0)[1:].mul_(3),
    "sparse": lambda x: torch.sparse.mm(torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (4, 4)), x),
    "reentrant checkpoint": lambda x: checkpoint(torch.exp, x, use_reentrant=True),
    "several outputs": lambda x: torch.linalg.svd(x)[1],
    "complex": lambda x: torch.fft.fft(x),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x[:2]]),
    "gradient of a gradient": lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0],
    "compiled": lambda x: torch.compile(torch.exp, backend="eager")(x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_are_shown(name: str) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    found = graph(ODD[name](x), names={"x": x})
    assert "x" in {leaf.name for leaf in found.leaves}
    assert str(found)
    assert found.dot().count("shape=box") == len(found.nodes)
    assert found.svg().count('<rect class="function"') == len(found.nodes)


def test_anomaly_detection_tells_the_line() -> None:
    with torch.autograd.set_detect_anomaly(True):
        y = torch.ones(3, requires_grad=True).exp()
    assert graph(y).nodes[0].line.startswith("test_graph.py:")


def test_a_tensor_without_a_graph() -> None:
    with pytest.raises(LowtideError, match=r"shape \[2, 3\] has no graph.*no_grad"):
        graph(torch.ones(2, 3))


# --- what is left alone ---------------------------------------------------------------------------------------------


def test_nothing_is_unpacked_or_run_again() -> None:
    runs = 0

    def block(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x.exp().sin()

    x = torch.ones(6, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False)
    found = graph(y)
    assert runs == 1
    assert {value.tensor for value in found.values if not value.is_leaf} == {None}
    y.sum().backward()
    assert runs == 2

    def unpack(packed: object) -> Tensor:
        raise AssertionError

    with saved_tensors_hooks(lambda tensor: (tensor.detach().half(), tensor.device), unpack):
        y = torch.ones(6, requires_grad=True).exp()
    (only,) = graph(y).nodes
    assert [(kept.packed, kept.bytes) for kept in only.kept] == [("tuple", 12)]


def test_a_plan_in_force_is_shown_as_packed_handles() -> None:
    """Recomputed tensors count as not held; kept ones are seen through Lowtide's handles."""
    case = build("llama")
    plan = lowtide.plan(lowtide.rehearse(case.model, case.step, case.batch), "70%")
    plain = graph(case.model(**case.batch).loss, model=case.model)
    with lowtide.apply(case.model, plan):
        planned = graph(case.model(**case.batch).loss, model=case.model)
    assert 0 < planned.held_bytes < plain.held_bytes
    assert {kept.packed for each in planned.nodes for kept in each.kept if kept.packed} == {"Handle"}


def test_backward_releases_under_the_eyes_of_a_graph() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = x.exp()
    found = graph(y)
    (value,) = (value for value in found.values if not value.is_leaf)
    assert value.tensor is not None
    y.sum().backward()
    assert value.tensor is None
    assert graph(y).held_bytes == 0


def test_the_graph_is_gone_when_the_result_is() -> None:
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(3, requires_grad=True)
        saved = x.exp()
        seen = weakref.ref(saved)
        y = saved * saved
        found = graph(y)
        str(found)
        found.svg()
        del saved, y
        assert seen() is not None  # a node keeps it, and the records keep the node
        del found
        assert seen() is None
    finally:
        gc.enable()


def test_thousands_of_nodes() -> None:
    x = torch.ones(1, requires_grad=True)
    for _ in range(5000):
        x = x.exp()
    found = graph(x)
    assert (len(found.nodes), found.held_bytes) == (5000, 20_000)
    assert len(str(found).splitlines()) == 5000 + 4
    assert found.dot().count(" -> ") == 5001
    assert found.svg().count("<rect class=") == 5002
    del found
