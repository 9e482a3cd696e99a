"""See the autograd graph: nodes, values, leaves, and what each node keeps in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lowtide.diagnostics.graph.build_graph import Walk
from lowtide.diagnostics.graph.graph_records import Kept, Node, Value
from lowtide.diagnostics.graph.module_names import name_modules, parameter_names
from lowtide.diagnostics.graph.whole_graph import Graph
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Graph", "Kept", "Node", "Value", "graph"]


def graph(
    tensor: Tensor | Iterable[Tensor],
    *,
    model: nn.Module | None = None,
    names: Mapping[str, Tensor] | None = None,
) -> Graph:
    """The autograd graph behind `tensor` (or several), as it is now: `print` it, or `save("graph.svg")`.

    With `model`, its parameters are called by name, nodes know the module that they ran in as far as it can be told
    (see `lowtide.diagnostics.graph.module_names`), and its buffers count as parameters. `names` calls further tensors
    by name.

    Nothing is computed: saved tensors are read as they are and no hook runs. What a checkpoint or another saved-tensor
    hook made of one is counted as far as tensors can be seen in it. Whatever the graph keeps alive lives at least as
    long as the result, or until a backward pass releases it.

    Raises LowtideError for a tensor without a graph.
    """
    roots = [tensor] if isinstance(tensor, Tensor) else list(tensor)
    for root in roots:
        if not root.requires_grad:
            raise LowtideError(
                f"this tensor of shape {list(root.shape)} has no graph: it needs no gradient. It was computed under "
                "no_grad or inference_mode, detached, or from tensors that need none. Give the result of a forward "
                "pass before it is detached."
            )
    known = {} if model is None else parameter_names(model)
    found = Walk(roots, {**known, **(names or {})}, known.values()).graph()
    if model is not None:
        name_modules(found, model)
    return found
