"""Release graphs that backward left behind: `release` for given tensors, `step` around a step, `loss_only`.

Releasing drops a tensor's reference to its graph. Values stay, and so does everything that another tensor still refers
to: a trunk that a second loss shares stays for that loss. After an ordinary `backward()` only empty nodes can be
released; after `retain_graph=True`, a partial backward or `create_graph=True` a whole graph is left.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from lowtide._torch.autograd_graph import collect_nodes
from lowtide._torch.backward import ENGINE, in_backward
from lowtide._torch.compiled_code import is_compiling_here
from lowtide._torch.nodes import node_metadata
from lowtide._torch.patching import replace_function, wrap_module_calls
from lowtide._torch.tensors import base_of
from lowtide.errors import LowtideError
from lowtide.utils.object_slots import read_slots
from lowtide.utils.removable import Removable

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

_REACHED = "lowtide.release"  # key in the metadata of nodes that a backward pass reached in a step


def release(*finished: Any) -> int:
    """Release the autograd graphs behind these tensors.

    Each tensor becomes the result of `.detach()`, in place: same values, same memory, no `grad_fn`. Call this function
    when no further backward pass starts from the tensors; torch rejects one.

    Args:
        *finished: Tensors, tuples, lists, dicts, objects such as the outputs of transformers, and modules. For a
            module, the graphs that `create_graph=True` left in its parameters' `.grad` are released.

    Returns:
        The number of graphs released.

    Raises:
        LowtideError: For a view that an object inside torch refers to, which cannot be detached in place.

    Example:
        >>> import torch, lowtide
        >>> loss = torch.nn.Linear(8, 1)(torch.ones(4, 8)).sum()
        >>> loss.backward()
        >>> lowtide.release(loss), loss.grad_fn
        (1, None)
    """
    return sum(map(_detach, _iterate_tensors(finished)))


def step() -> AbstractContextManager[Step]:
    """Release, at the end of a `with` block, the graphs that backward passes inside the block reached and left behind.

    The block releases the graphs of tensors that backward started from, of model outputs that backward reached, and,
    after `create_graph=True`, of gradients in the `.grad` of parameters. Graphs that no backward pass reached stay: the
    step may still need them. Only weak references are remembered, and only the thread that enters the block is
    observed.

    Returns:
        The context manager; its `n_released` counts the tensors whose graph was released.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Linear(8, 1)
        >>> with lowtide.step() as block:
        ...     loss = model(torch.ones(4, 8)).sum()
        ...     loss.backward()
        >>> block.n_released, loss.grad_fn
        (1, None)
    """
    return Step()


class Step(AbstractContextManager["Step"]):
    """Context manager for a training step; its `n_released` counts the tensors whose graph was released at the end."""

    def __init__(self) -> None:
        self.n_released = 0
        self._tensors: list[weakref.ref[Tensor]] = []
        self._leaves: list[weakref.ref[Tensor]] = []
        self._undo: list[Callable[[], None]] = []
        self._depth = 0
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        if self._undo:
            raise LowtideError(
                "this lowtide.step() was entered before. Write a new `with lowtide.step():` for each step."
            )

        def make(engine: Callable[..., Any]) -> Callable[..., Any]:
            def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
                if self._is_here() and not in_backward():
                    self._record_backward(outputs, creates_graph=bool((*args, None, None, None)[2]))
                return engine(outputs, *args, **kwargs)

            return run_backward

        self._undo = [wrap_module_calls(self._begins, self._ends), replace_function(torch.autograd, ENGINE, make)]
        return self

    def __exit__(self, *_: object) -> None:
        while self._undo:
            self._undo.pop()()
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and tensor.grad_fn is not None and _is_reached(tensor.grad_fn):
                self.n_released += _detach(tensor, must=False)
        for reference in self._leaves:
            leaf = reference()
            if leaf is not None and leaf.grad is not None and leaf.grad.grad_fn is not None:
                self.n_released += _detach(leaf.grad, must=False)

    def _is_here(self) -> bool:
        """Return True if the current thread is the one that entered the block."""
        return threading.get_ident() == self._thread

    def _begins(self, module: nn.Module) -> None:
        self._depth += self._is_here()

    def _ends(self, module: nn.Module, output: Any) -> None:
        if not self._is_here():
            return
        self._depth -= 1
        if self._depth or in_backward() or is_compiling_here():
            return
        for tensor in _iterate_tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_Reached(tensor.grad_fn))
                self._tensors.append(weakref.ref(tensor))

    def _record_backward(self, outputs: Iterable[Any], *, creates_graph: bool) -> None:
        for output in outputs:
            node = output.grad_fn if isinstance(output, Tensor) else None
            if node is None:
                continue
            node_metadata(node)[_REACHED] = True
            self._tensors.append(weakref.ref(output))
            if creates_graph:
                self._leaves += [weakref.ref(leaf) for leaf in _find_leaves_behind(node)]


class _Reached:
    """A hook on an autograd node that records, in the node's metadata, that backward has reached the node.

    The hook refers only to the metadata dict, which has no reference back to the node.
    """

    __slots__ = ("_metadata",)

    def __init__(self, node: Node) -> None:
        self._metadata = node_metadata(node)

    def __call__(self, gradients: Any) -> None:
        self._metadata[_REACHED] = True


class LossOnly(Removable):
    """The hook of `loss_only`; `remove()`, or the end of a `with` block, removes it."""

    def __init__(self, handle: RemovableHandle) -> None:
        self._handle = handle

    def remove(self) -> None:
        """Make the model return all its outputs again."""
        self._handle.remove()


def loss_only(model: nn.Module) -> LossOnly:
    """Make a model of transformers return its loss alone while it trains, so that its logits are freed before backward.

    A training loop that writes `outputs = model(**batch)` holds the logits through backward, at the step's peak: 15 %
    of it for a small GPT-2, 19 % with checkpointing (bench/retention.py). With this hook `outputs` has a `loss` and
    None elsewhere, in training and with gradients enabled; otherwise, and without labels, it is unchanged. Loss,
    gradients and names do not change.

    Args:
        model: A model of transformers.

    Returns:
        The hook; `remove()`, or the end of a `with` block, removes it.

    Example:
        >>> import torch, lowtide
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10, n_positions=4)).train()
        >>> tokens = torch.ones(1, 4, dtype=torch.long)
        >>> with lowtide.loss_only(model):
        ...     outputs = model(tokens, labels=tokens)
        >>> outputs.loss.shape, outputs.logits is None
        (torch.Size([]), True)
    """
    return LossOnly(model.register_forward_hook(_keep_only_loss))


def _keep_only_loss(model: nn.Module, args: Any, output: Any) -> Any:
    if not (model.training and torch.is_grad_enabled()):
        return None  # unchanged
    kind: Any = type(output)
    if isinstance(output, dict) and hasattr(kind, "__dataclass_fields__") and isinstance(output.get("loss"), Tensor):
        return kind(loss=output["loss"])
    return None


def _detach(tensor: Tensor, *, must: bool = True) -> bool:
    """Detach a tensor in place; return True if that released its graph.

    Raises LowtideError for a view that torch can't detach; without `must`, the view is left as it is.
    """
    if tensor.grad_fn is None:
        return False
    if base_of(tensor) is None:
        tensor.detach_()
        return True
    # torch refuses to detach views in place, but allows another tensor to be swapped in for the view
    detached = tensor.detach()
    try:
        torch.utils.swap_tensors(tensor, detached)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if must:
            raise LowtideError(
                f"a view of shape {tuple(tensor.shape)} cannot be detached in place: {error}.\n"
                "  Drop it instead (`del`), or keep `view.detach()` of it."
            ) from error
        return False
    return True


def _iterate_tensors(obj: Any) -> Iterator[Tensor]:
    pending, visited = [obj], {}
    while pending:
        obj = pending.pop()
        if id(obj) in visited:
            continue
        visited[id(obj)] = obj
        if isinstance(obj, Tensor):
            yield obj
        elif isinstance(obj, nn.Module):
            yield from (p.grad for p in obj.parameters() if p.grad is not None)
        elif isinstance(obj, list | tuple | set | frozenset | deque):
            pending += obj
        elif not isinstance(obj, type):
            if isinstance(obj, dict):
                pending += obj.values()
            pending += (*getattr(obj, "__dict__", {}).values(), *read_slots(obj))


def _is_reached(node: Node) -> bool:
    return bool(node_metadata(node).get(_REACHED))


def _find_leaves_behind(node: Node) -> list[Tensor]:
    """Return the leaf tensors into whose `.grad` a backward pass that starts at `node` accumulates."""
    variables = (getattr(behind, "variable", None) for behind in collect_nodes([node]))
    return [leaf for leaf in variables if isinstance(leaf, Tensor)]
