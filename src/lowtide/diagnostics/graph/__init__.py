"""`lowtide.graph`: the autograd graph as records of nodes, values and the memory that each node keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lowtide.diagnostics.graph.build_graph import GraphBuilder
from lowtide.diagnostics.graph.graph_records import Kept, Node, Value
from lowtide.diagnostics.graph.module_names import collect_named_tensors, name_modules
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
    """Return the autograd graph behind `tensor` as it is now: `print` it, or `save("graph.svg")`.

    Nothing is computed: saved tensors are read as they are and no hook runs. Tensors packed by a checkpoint or another
    saved-tensor hook are counted as far as they can be seen in the packed object. The result keeps the graph's tensors
    alive until it is dropped, or a backward pass releases them.

    Args:
        tensor: One result, or several.
        model: Gives parameters and buffers their names, and each node the path of the module that it ran in, as far
            as known (see `lowtide.diagnostics.graph.module_names`). Buffers count as parameters.
        names: Further tensors by name.

    Returns:
        The graph: its nodes, the tensors that each has saved, and their bytes.

    Raises:
        LowtideError: A tensor has no graph.

    Example:
        >>> import torch, lowtide
        >>> w, x = torch.ones(3, 4, requires_grad=True), torch.ones(4)
        >>> graph = lowtide.graph((w @ x).tanh().sum(), names={"w": w})
        >>> graph.held_bytes  # x for the product, and the result of tanh
        28
    """
    roots = [tensor] if isinstance(tensor, Tensor) else list(tensor)
    for root in roots:
        if not root.requires_grad:
            raise LowtideError(
                f"this tensor of shape {list(root.shape)} has no graph: it needs no gradient. It was computed under "
                "no_grad or inference_mode, detached, or from tensors that need none. Give the result of a forward "
                "pass before it is detached."
            )
    known = {} if model is None else collect_named_tensors(model)
    result = GraphBuilder(roots, {**known, **(names or {})}, known.values()).graph()
    if model is not None:
        name_modules(result, model)
    return result
