"""Private names of torch: backward passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.autograd.graph import Node
from lowtide._torch.nodes import sequence_number

backward_number = torch._C._current_graph_task_id
"""Number of the backward pass that runs in this thread, counted from 0; -1 for none. Read in torch 2.13; present since
2.1.
"""


def in_forward_mode() -> bool:
    """Return True if forward-mode AD computes tangents (`torch.autograd.forward_ad`). Relies on internals of torch
    2.13, present since 1.8.
    """
    return torch.autograd.forward_ad._current_level >= 0


_TRANSFORMS = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode


def in_transform() -> bool:
    """Return True if a transform of torch.func (grad, vmap, jvp) runs in this thread; its tensors may have no memory.

    The stack of transforms is read only if their dispatch key is in force: torch creates the stack when it is first
    read, and from then on copies it for each node of each backward pass. Relies on internals of torch 2.13, present
    since 2.1.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_included(_TRANSFORMS):
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None


is_tracing = torch._C._is_tracing
"""Return True if `torch.jit.trace` runs in this thread. Relies on internals of torch 2.13, present since 1.0."""


def in_backward() -> bool:
    """Return True if a backward pass is running in this thread. Relies on internals of torch 2.13."""
    return backward_number() != -1


def get_running_node_number() -> int:
    """Return the `sequence_number` of the node that backward runs in this thread, or -1. Relies on internals of torch
    2.13, present since 2.1.
    """
    node: Node | None = torch._C._current_autograd_node()
    return -1 if node is None else sequence_number(node)


ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
"""Name (`node.name()`) of the nodes that accumulate a leaf's gradient. Read in torch 2.13; present since 1.0."""


def get_running_node() -> Node | None:
    """Return the node whose backward runs in this thread, or None. Relies on internals of torch 2.13, present since
    2.1.
    """
    node: Node | None = torch._C._current_autograd_node()
    return node


def get_running_node_name() -> str:
    """Return the name of the node whose backward runs in this thread, such as `GeluBackward0`; empty if none runs.

    Relies on internals of torch 2.13, present since 2.1.
    """
    node = get_running_node()
    return "" if node is None else node.name()


def get_running_function() -> type | None:
    """Return the `torch.autograd.Function` whose backward runs in this thread, or None. Relies on internals of torch
    2.13, present since 2.1.
    """
    return getattr(get_running_node(), "_forward_cls", None)


ENGINE = "_engine_run_backward"
"""Name in `torch.autograd` of the function that `backward` and `grad` call to run a backward pass. Arguments: outputs,
their gradients, retain_graph, create_graph, inputs. Read in torch 2.13; present since 2.3.
"""

BACKWARD_CALL = torch.autograd.graph._engine_run_backward.__code__
"""Code object of the Python function that calls torch's C++ autograd engine. Read in torch 2.13; present since 2.3."""
