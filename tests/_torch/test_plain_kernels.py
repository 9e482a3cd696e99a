"""Graphs of 16-bit values under a plan, as inductor gets them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from lowtide._torch.joint_graph import JointGraph, partitioned
from lowtide._torch.plain_kernels import RECOMPUTED, WRITTEN, with_plain_backward, write_as_plain

Choose = Callable[[JointGraph, frozenset[int]], frozenset[int]]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = functional.layer_norm(functional.gelu(x @ weight).float(), (8,))
        return (hidden @ weight + hidden).sum()


def compiled(choose: Choose) -> tuple[list[Tensor], list[fx.GraphModule]]:
    """Return the gradients and the graphs of forward and backward, as `choose` saves their values."""
    graphs = list[fx.GraphModule]()

    def compiler(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, partition_fn=partial(partitioned, choose=choose))
    torch.manual_seed(0)
    inputs = [torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    torch._dynamo.reset()
    torch.compile(normed, backend=backend)(*inputs).backward()
    return [x.grad for x in inputs if x.grad is not None], graphs


def only_products(joint: JointGraph, plain: frozenset[int]) -> frozenset[int]:
    """Save products and small values alone: all others are recomputed."""
    return frozenset(at for at in plain if joint.nodes[at].kind != "pointwise") | {
        at for at, node in enumerate(joint.nodes) if node.target == "aten.mm" and node.is_forward
    }


def targets(nodes: Iterable[fx.Node]) -> list[str]:
    return [str(node.target) for node in nodes if node.op == "call_function"]


def test_backward_is_torchs_own_behind_what_is_recomputed() -> None:
    expected, (_, plain) = compiled(lambda _, own: own)
    gradients, (forward, backward) = compiled(only_products)
    assert all(map(torch.equal, gradients, expected))
    again = [node for node in backward.graph.nodes if RECOMPUTED in node.meta]
    assert any(WRITTEN in node.meta for node in again)
    assert any(WRITTEN in node.meta for node in forward.graph.nodes)
    own = targets(node for node in backward.graph.nodes if RECOMPUTED not in node.meta)
    assert own == targets(plain.graph.nodes)


def test_a_value_that_only_the_plan_saves_is_computed_as_torch_does_if_its_operands_are_known() -> None:
    planned = fx.symbolic_trace(lambda x, add, tangent: tangent * torch.exp(x) * add)
    plain = fx.symbolic_trace(lambda exp, x, tangent: tangent * exp * (exp + x))
    with_plain_backward(planned, plain, {"exp"}, ())
    assert [node.name for node in planned.graph.find_nodes(op="placeholder")] == ["x", "add", "tangent"]
    x, tangent = torch.randn(3), torch.randn(3)
    assert torch.equal(planned(x, torch.zeros(3), tangent), tangent * torch.exp(x) * (torch.exp(x) + x))


def test_otherwise_it_is_read() -> None:
    planned = fx.symbolic_trace(lambda add, tangent: tangent * add)
    plain = fx.symbolic_trace(lambda exp, x, tangent: tangent * (exp + x))
    with_plain_backward(planned, plain, {"exp"}, ())
    assert planned(torch.tensor(2.0), torch.tensor(3.0)) == 6


def test_forward_writes_what_it_reads_itself() -> None:
    forward = fx.symbolic_trace(lambda x: torch.exp(x) + torch.sin(x))
    write_as_plain(forward, {"exp", "cos"})
    assert [node.name for node in forward.graph.nodes if WRITTEN in node.meta] == ["exp"]
