"""Capture of operands that autograd does not record, while a call of a module runs.

Autograd does not record a number that is added to a tensor, subtracted from it, or put in its place by `where` or
`masked_fill`, nor a tensor in that role that needs no gradient, such as the mask that attention adds to its scores; no
edge leads to such an operand. There are three ways to learn it, in each step again, because a schedule may change it:

- Compute it: the result minus the other operand, compared everywhere. The other operand is mostly recomputed itself and
  already freed when the result is saved; recomputing it in forward, or holding it, costs the memory to be saved.
- Remember the rehearsal's operand, and compare some elements in each step. That is a guess.
- Observe it. A `TorchFunctionMode` sees each operator that Python calls, with its arguments. That takes about 1.5 us an
  operator (`x + 1` takes 3), and reads no element.

So the audit has such a mode in force all the time and marks the recomputes that depend on it
(`Recompute.captured_sites`), and a plan puts it in force only in the calls with such recomputes. A number is stored at
its node. A tensor is held from then on, if the plan says that a recompute will use it; it counts as memory, and has a
number like a saved tensor. A captured operand is used for a node only if the node's other edges are those of the
operator's other operands.

The mode does not see operators that are called from C++, as in scripted modules: their results are kept. There is one
exception: attention without a fused kernel adds its mask inside, to scores that nothing saves. That mask is taken from
the arguments of attention, and looked up while it runs (`attention_scores.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide._torch.compiled_code import is_compiling_anywhere, is_compiling_here, is_traced
from lowtide._torch.nodes import next_sequence_number, node_metadata
from lowtide._torch.tensors import PACK_PADDED, is_plain
from lowtide.runtime.inplace_methods import torchs_own
from lowtide.runtime.recipes import RECIPES

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from lowtide.runtime.saved_values import Value

Number = bool | int | float | complex
NUMBERS = (int, float, complex)
"""Types of `Number` as a tuple, for `isinstance`, which is slower with a union. A bool is an int."""
_KINDS = (*NUMBERS, Tensor)

_BINARY = ("self", "other")
_FILLED = ("self", "mask", "value")
_PRODUCT = ("self", "batch1", "batch2")
_OPERANDS: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.add: _BINARY,
    torch.Tensor.add: _BINARY,  # also +
    torch.Tensor.add_: _BINARY,  # also +=
    torch.sub: _BINARY,
    torch.Tensor.sub: _BINARY,
    torch.Tensor.sub_: _BINARY,
    torch.rsub: _BINARY,
    torch.Tensor.__rsub__: _BINARY,
    torch.baddbmm: _PRODUCT,
    torch.Tensor.baddbmm: _PRODUCT,
    torch.where: ("condition", "self", "other"),
    torch.Tensor.where: ("self", "condition", "other"),
    torch.masked_fill: _FILLED,
    torch.Tensor.masked_fill: _FILLED,
    torch.Tensor.masked_fill_: _FILLED,
}
"""Operators with operands that autograd does not record, and the names of their operands as in its nodes."""

_SIZED_BY_CONTENTS: dict[Callable[..., Any], str] = {
    torch.nonzero: "nonzero",
    torch.Tensor.nonzero: "nonzero",
    torch.argwhere: "nonzero",
    torch.Tensor.argwhere: "nonzero",
    torch.where: "nonzero",  # called with a condition only
    torch.masked_select: "masked_select",
    torch.Tensor.masked_select: "masked_select",
    torch.Tensor.__getitem__: "indexing with a mask",
    torch.unique: "unique",
    torch.Tensor.unique: "unique",
    torch.unique_consecutive: "unique_consecutive",
    torch.Tensor.unique_consecutive: "unique_consecutive",
    torch.repeat_interleave: "repeat_interleave",
    torch.Tensor.repeat_interleave: "repeat_interleave",
    PACK_PADDED: "pack_padded_sequence",
    F.ctc_loss: "ctc_loss",  # saves as many columns as the longest target needs
    torch.matrix_exp: "matrix_exp",  # used by `parametrizations.orthogonal`; larger norms take more terms
    torch.linalg.matrix_exp: "matrix_exp",
    torch.Tensor.matrix_exp: "matrix_exp",
}
"""Operators whose memory depends on the contents of their arguments, each with a description."""

_WATCHED = frozenset({*_OPERANDS, *_SIZED_BY_CONTENTS, F.scaled_dot_product_attention})

CAPTURED_OPERANDS = ("lowtide", "captured")
"""Key, in a node's metadata, of the operands that were captured for it."""

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

_SAVED = frozenset({"condition", "mask"})
"""Names of the operands in `_OPERANDS` that the autograd node itself saves."""


class CaptureListener(Protocol):
    """Receiver of the operands that `OperandCapture` captures: `ForwardPass`, one run of a model's forward."""

    def get_site_of_numbers(self) -> CaptureSite:
        """Return the site for numbers captured in the module call in progress; all of them share one."""

    def unrecorded(self, operand: Tensor) -> tuple[CaptureSite, Value | None]:
        """Return the site of an operand that autograd does not record, and a Value that holds it; None instead of the
        Value if no recompute needs it.
        """

    def report_sized_by_contents(self, operator: str) -> None:
        """Report an operator whose memory depends on the contents of its arguments."""


class CaptureSite(NamedTuple):
    """Place at which an operand was captured: a module call, and the operand's ordinal among those captured in it."""

    call: str
    """Address of the module call that contains the operator."""
    ordinal: int | None = None
    """Ordinal of a tensor, which has to be held, among the tensors captured in the call; None for a number."""

    def __str__(self) -> str:
        return self.call if self.ordinal is None else f"{self.call}+{self.ordinal}"


class CapturedOperand(NamedTuple):
    """An operand that autograd does not record, captured when the operator was called, with its site."""

    place: CaptureSite
    what: Number | Tensor | weakref.ref[Value]
    """A number, a copy of a tensor with one element (changes of the tensor itself would go unnoticed), or a weak
    reference to the Value that holds a larger tensor.
    """


class Attention(NamedTuple):
    """A call of attention with a mask that autograd does not record."""

    first: int
    """Sequence number of the first node that the call makes."""
    place: CaptureSite
    mask: Value | None
    """The mask; None if each position attends to itself and those before it."""


class _Here(threading.local):
    attention: Attention | None = None
    """The call of attention in progress in this thread."""


here = _Here()


class OperandCapture(TorchFunctionMode):
    """Function mode that stores operands which autograd does not record, in the metadata of the operators' nodes."""

    def __init__(self, listener: CaptureListener) -> None:
        super().__init__()
        self._listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = torchs_own.get(func, func)
        if func not in _WATCHED:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not is_compiling_here():
            here.attention = self._capture_mask(dict(zip(_ATTENTION, args, strict=False)) | kwargs)
            try:
                return func(*args, **kwargs)
            finally:
                here.attention = None
        if func in _SIZED_BY_CONTENTS and is_sized_by_contents(func, args, kwargs):
            self._listener.report_sized_by_contents(_SIZED_BY_CONTENTS[func])
        names = _OPERANDS.get(func)
        if names is None or is_traced() or (is_compiling_anywhere() and is_compiling_here()):
            return func(*args, **kwargs)
        is_in_order = len(args) == len(names) and not kwargs
        operands = dict(zip(names, args, strict=True)) if is_in_order else _name_operands(names, args, kwargs)
        edges: dict[str, tuple[Any, int] | None] = {}
        """For each operand, its `grad_fn` (or the operand itself if it is a leaf) and output number; None if it needs
        no gradient.
        """
        unrecorded: list[tuple[str, Number | Tensor]] = []
        for name, operand in operands.items():
            if isinstance(operand, Tensor) and operand.requires_grad:
                edges[name] = operand if operand.grad_fn is None else operand.grad_fn, operand.output_nr
            else:
                edges[name] = None
                if name not in _SAVED and isinstance(operand, _KINDS):
                    unrecorded.append((name, operand))
        if not unrecorded:
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        node = out.grad_fn if isinstance(out, Tensor) else None
        if node is not None and _belongs_to(node, edges):
            metadata = node_metadata(node)
            known = metadata.get(CAPTURED_OPERANDS)  # captured by the plan of an outer model
            if known is None:
                known = metadata[CAPTURED_OPERANDS] = {}
            for name, operand in unrecorded:
                if (captured := self._capture(operand, out)) is not None:
                    known[name] = captured
        return out

    def _capture(self, operand: Number | Tensor, out: Tensor) -> CapturedOperand | None:
        """Capture `operand` of an operator that returned `out`.

        Returns None for a tensor that can't be held, is too large to gain anything, or is not needed by the plan.
        """
        if not isinstance(operand, Tensor):
            return CapturedOperand(self._listener.get_site_of_numbers(), operand)
        if operand.numel() == 1:
            return CapturedOperand(self._listener.get_site_of_numbers(), operand.detach().clone())
        if operand is out or not _is_worth_holding(operand, out.numel()):
            return None
        place, value = self._listener.unrecorded(operand)
        return None if value is None else CapturedOperand(place, weakref.ref(value))

    def _capture_mask(self, given: dict[str, Any]) -> Attention | None:
        """Capture the mask of a call of attention with the arguments `given`.

        Returns None without a mask, or if the mask can't be held or is not needed by the plan.
        """
        query, key, mask = given.get("query"), given.get("key"), given.get("attn_mask")
        if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
            return None
        if mask is None:
            is_causal = bool(given.get("is_causal"))
            return Attention(next_sequence_number(), self._listener.get_site_of_numbers(), None) if is_causal else None
        scores = query.numel() // max(1, query.shape[-1]) * key.shape[-2]
        if not (isinstance(mask, Tensor) and not mask.requires_grad and _is_worth_holding(mask, scores)):
            return None
        place, held = self._listener.unrecorded(mask)
        return None if held is None else Attention(next_sequence_number(), place, held)


def is_sized_by_contents(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the memory of this call of a function in `_SIZED_BY_CONTENTS` depends on its arguments'
    contents.
    """
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else args[1:2]
        return any(isinstance(it, Tensor) and it.dtype in (torch.bool, torch.uint8) for it in index)
    if _SIZED_BY_CONTENTS[func] == "repeat_interleave":
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        return isinstance(repeats, Tensor) and "output_size" not in kwargs
    return func is not torch.where or len(args) == 1


def find_captured_operand(node: Node, name: str) -> tuple[CaptureSite, Number | Tensor | Value] | None:
    """Return the operand `name` that was captured for `node` in forward, with its site.

    Returns None if none was captured, or if the Value that held it has been freed.
    """
    known: dict[str, CapturedOperand] | None = node_metadata(node).get(CAPTURED_OPERANDS)
    captured = None if known is None else known.get(name)
    if captured is None:
        return None
    what = captured.what() if isinstance(captured.what, weakref.ref) else captured.what
    return None if what is None else (captured.place, what)


def _is_worth_holding(operand: Tensor, size: int) -> bool:
    """Return True if an operand can be held, and has at most half as many elements as a result of `size` elements."""
    return is_plain(operand) and not operand.is_inference() and 2 * operand.numel() <= size


def _belongs_to(node: Node, edges: dict[str, tuple[Any, int] | None]) -> bool:
    """Return True if the operator whose operands have these `edges` made `node`, not another operator that calls it."""
    recipe = RECIPES.get(node.name())
    if recipe is None:
        return False
    functions = node.next_functions
    for name, index in recipe.edges.items():
        upstream, output = functions[index]
        expected = edges.get(name)
        if upstream is None or expected is None:
            if upstream is not None or expected is not None:
                return False
        else:
            is_same = upstream is expected[0] or getattr(upstream, "variable", None) is expected[0]
            if output != expected[1] or not is_same:
                return False
    return True


def _name_operands(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operator's operands by name; an empty dict for unexpected arguments."""
    given = dict(zip(names, args, strict=False)) | {
        name: it for name, it in kwargs.items() if name not in {"alpha", "beta"}
    }
    return given if len(args) <= len(names) and given.keys() == set(names) else {}
