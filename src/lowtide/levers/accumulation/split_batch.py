"""`lowtide.micro_batches`: split a batch along its rows, in any nesting of containers."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lowtide.errors import LowtideError

Batch = TypeVar("Batch")

Span = tuple[int, int]
"""Range of rows: the first row, and the row after the last."""


def micro_batches(batch: Batch, n: int, *, shared: Collection[str] = ()) -> list[Batch]:
    """Split `batch` into `n` batches of the same type, whose rows are views of its rows: sizes differ by one at most.

    A batch of fewer than `n` rows gives one piece per row. Dicts (`BatchEncoding` included), lists, tuples, named
    tuples and dataclasses may be nested in any way; lists of things other than tensors and NumPy arrays are split if
    they have one entry per row. Numbers, text, tensors without dimensions and tensors of one row go to every piece
    whole.

    Args:
        batch: The batch. Rows are dimension 0, and the first tensor determines their number.
        n: Number of pieces, at least 1.
        shared: Keys of entries that go to every piece whole.

    Returns:
        The pieces in the order of their rows, the longer ones first.

    Raises:
        LowtideError: If `n` is below 1, a tensor has another number of rows, or a container can't be split.

    Example:
        >>> import torch, lowtide
        >>> batch = {"x": torch.ones(10, 3), "scale": 0.5}
        >>> [part["x"].shape[0] for part in lowtide.micro_batches(batch, 4)]
        [3, 3, 2, 2]
    """
    if not hasattr(n, "__index__") or n < 1:
        raise LowtideError(f"micro_batches was asked for {n!r} pieces; give a whole number, 1 or more.")
    rows = rows_of(batch, shared)
    splitter = _Splitter(rows, frozenset(shared))
    return [cast("Batch", splitter.part(batch, span, "")) for span in spans(rows, n)]


def spans(rows: int, n: int) -> list[Span]:
    """Split `rows` rows into `n` ranges, the longer ranges first; into single rows if there are fewer than `n` rows."""
    n = min(n, rows)
    size, longer = divmod(rows, n)
    ends = [size * (i + 1) + min(i + 1, longer) for i in range(n)]
    return list(zip([0, *ends], ends, strict=False))


def take_first_rows(batch: Batch, n: int, shared: Collection[str] = ()) -> Batch:
    """Return the first `n` rows of `batch`, cut as by `micro_batches`; entries named in `shared` stay whole."""
    return cast("Batch", _Splitter(rows_of(batch, shared), frozenset(shared)).part(batch, (0, n), ""))


def rows_of(batch: Any, shared: Collection[str] = ()) -> int:
    """Count the rows of `batch`: the size of dimension 0 of its first tensor that has dimensions and is not `shared`.

    Raises LowtideError if there is no such tensor, or if it has no rows.
    """
    for name, tensor in find_tensors_by_name(batch):
        if tensor.dim() and not set(name.split(".")) & set(shared):
            if not tensor.shape[0]:
                raise LowtideError(f"{name or 'the batch'} has no rows: there is nothing to cut.")
            return tensor.shape[0]
    raise LowtideError(
        f"no rows were found: this {type(batch).__name__} holds no tensor with a dimension. Give the batch as the data "
        "loader yields it: tensors, or dicts, lists, tuples and dataclasses of tensors."
    )


def find_tensors_by_name(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a batch with their paths: `labels`, `0.boxes`."""
    if isinstance(batch, Tensor):
        yield name, batch
        return
    for key, child in _children(batch):
        yield from find_tensors_by_name(child, f"{name}.{key}" if name else key)


def _children(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        yield from ((str(key), child) for key, child in batch.items())
    elif isinstance(batch, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(batch))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from ((field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch))


class _Splitter:
    def __init__(self, rows: int, shared: frozenset[str]) -> None:
        self._rows = rows
        self._shared = shared

    def part(self, batch: Any, span: Span, name: str) -> Any:
        """Return the rows `span` of `batch`, a container or tensor at path `name` inside the whole batch."""
        if name.rpartition(".")[2] in self._shared:
            return batch
        if isinstance(batch, Tensor):
            return self._cut_tensor(batch, span, name)
        if isinstance(batch, PackedSequence):
            raise self._build_refusal(
                name, "a PackedSequence is ordered by length, not by row; pack the pieces instead"
            )
        children = {key: self.part(child, span, f"{name}.{key}" if name else key) for key, child in _children(batch)}
        if isinstance(batch, Mapping):
            return self._fill_mapping(batch, children, span)
        if isinstance(batch, list | tuple):
            if len(batch) == self._rows and not any(True for _ in find_tensors_by_name(batch)):
                return batch[slice(*span)]  # texts, file names, numbers: one per row
            parts = list(children.values())
            if hasattr(batch, "_fields"):  # the constructor of a named tuple takes items one by one
                return type(batch)(*parts)
            return type(batch)(parts)
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            changed = copy.copy(batch)
            for key, child in children.items():
                object.__setattr__(changed, key, child)  # bypasses frozen dataclasses
            return changed
        return self._cut_other(batch, span, name)

    def _cut_tensor(self, tensor: Tensor, span: Span, name: str) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise self._build_refusal(
                name, "it is sparse or nested; make it dense, or cut the batch in the data loader"
            )
        if tensor.dim() == 0 or (tensor.shape[0] == 1 and self._rows != 1):
            return tensor
        if tensor.shape[0] != self._rows:
            raise self._build_refusal(
                name,
                f"it has {tensor.shape[0]} rows where the batch has {self._rows}. If every piece needs all of it, say "
                f"shared={{{name.rpartition('.')[2]!r}}}",
            )
        return tensor[slice(*span)]

    def _fill_mapping(self, batch: Mapping[Any, Any], children: dict[str, Any], span: Span) -> Any:
        keys = list(batch)
        changed = copy.copy(batch)
        for key, child in zip(keys, children.values(), strict=True):
            changed[key] = child  # type: ignore[index]
        encodings = getattr(batch, "_encodings", None)  # of a BatchEncoding, for word_ids() and such: one per row
        if encodings is not None and len(encodings) == self._rows:
            changed._encodings = encodings[slice(*span)]  # type: ignore[attr-defined]
        return changed

    def _cut_other(self, obj: Any, span: Span, name: str) -> Any:
        if obj is None or isinstance(obj, bool | int | float | complex | str | bytes | enum.Enum | type):
            return obj
        if isinstance(obj, torch.dtype | torch.device | torch.Generator):
            return obj
        shape = getattr(obj, "shape", None)  # NumPy arrays and similar types
        if isinstance(shape, tuple) and hasattr(obj, "__getitem__"):
            return obj[slice(*span)] if shape and shape[0] == self._rows else obj
        raise self._build_refusal(
            name,
            f"a {type(obj).__name__} can't be cut into rows. Pass dicts, lists, tuples or dataclasses; if every "
            f"piece needs all of it, say shared={{{name.rpartition('.')[2]!r}}}",
        )

    def _build_refusal(self, name: str, why: str) -> LowtideError:
        return LowtideError(f"{name or 'this batch'} can't be cut into micro-batches: {why}.")
