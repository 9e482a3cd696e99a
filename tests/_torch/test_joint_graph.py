"""Joint graphs as they are read from torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from lowtide._torch.joint_graph import JointGraph, partitioned


def test_sizes_that_are_symbolic_stay_symbolic() -> None:
    """Code for one size alone has other kernels than the plain loop's, and is compiled again for each size."""
    compiled, joints = list[str](), list[JointGraph]()

    def choose(joint: JointGraph, plain: frozenset[int]) -> frozenset[int]:
        joints.append(joint)
        return plain

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph.code)
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, partition_fn=partial(partitioned, choose=choose))

    @torch.compile(backend=backend, dynamic=True)
    def attend(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x).square().sum()

    for rows, length in ((3, 16), (5, 24)):
        attend(torch.randn(rows, 2, length, 8, requires_grad=True)).backward()
    assert len(compiled) == 2  # forward and backward
    (joint,) = joints
    assert sum(node.flops for node in joint.nodes) > 0
