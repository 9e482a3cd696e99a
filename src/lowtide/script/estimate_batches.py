"""The batches of a script's estimated steps: another size in place of the script's own, and a note on several sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lowtide.estimator.batch_search import measure_size, resized
from lowtide.runtime.batch_tensors import collect_tensors, put_in_words
from lowtide.script.calling_code import find_caller_variables

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.estimator.two_step_run import TwoStepRun


class BatchSize:
    """The size that every batch of the script gets in its first dimension; None leaves batches unchanged."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self._own_size: int | None = None
        """Size of the script's own batch, once it is known."""

    def find_resizable_tensors(self, batch: Any, *, is_first: bool) -> list[Tensor]:
        """Return the leaf tensors, in `batch` and callers' variables, whose first dimension has the length of the
        script's own batches.

        With `is_first`, tensors as long as the first tensor of `batch` are included: a step may begin with a smaller
        batch, such as the last one of an epoch. Computed tensors are excluded: a generator's images, for example,
        already have the new length.
        """
        if self.size is None:
            return []
        self._own_size = self._own_size or measure_size(batch, 0)
        first = collect_tensors(batch)[: int(is_first)]
        lengths = {self._own_size, *(t.shape[0] for t in first if t.is_leaf and t.dim())} - {self.size}
        near = (*collect_tensors(batch), *_find_caller_tensors())
        return [tensor for tensor in near if tensor.is_leaf and tensor.dim() and tensor.shape[0] in lengths]

    def resize(self, tensors: list[Tensor], run: TwoStepRun) -> None:
        """Resize the first dimension of `tensors` to `size`, and note in the answers of `run` each former length."""
        size = self.size
        if size is None:
            return
        for length in {int(tensor.shape[0]) for tensor in tensors}:
            note = f"what is {length} long in its first dimension is the batch, and taken to be {size} long"
            run.answers.notes[note] = None
        run.assume_length(None)
        run.put(tensors, lambda tensor: resized(tensor, 0, tensor.shape[0], size))

    def expect_next(self, run: TwoStepRun) -> None:
        """Count the script's next batch at `size` elements: its memory is allocated before the batch can be resized."""
        if self._own_size is not None and self.size is not None:
            run.assume_length((self._own_size, self.size))


class FirstCalls:
    """The first call of each step, compared with the previous step's first call to detect varying batch sizes."""

    def __init__(self) -> None:
        self._is_next = False
        """True until the first call of a step."""
        self._sizes = ""
        """Shapes and dtypes of the tensors in the first call of the last step, as text."""
        self._form: tuple[weakref.ref[Any], list[tuple[torch.dtype, int]]] | None = None
        """Module of that call, and dtype and number of dimensions of each tensor."""

    def begin_step(self) -> None:
        """Treat the next call as the first call of a step."""
        self._is_next = True

    def differ_in_size(self, called: Callable[..., Any], batch: Any) -> tuple[str, str] | None:
        """Return the tensor sizes in the first calls of the previous step and this one, if only the sizes differ.

        Return None otherwise, and for later calls of a step.
        """
        if not self._is_next:
            return None
        self._is_next = False
        tensors = collect_tensors(batch)
        sizes_before, self._sizes = self._sizes, put_in_words(tensors)
        form_before, self._form = self._form, (weakref.ref(called), [(t.dtype, t.dim()) for t in tensors])
        return (sizes_before, self._sizes) if form_before == self._form and sizes_before != self._sizes else None


def _find_caller_tensors() -> Iterator[Tensor]:
    """Yield tensors in variables of functions that call the model: the batch, and labels that the loss will read."""
    for value in find_caller_variables():
        tensors = collect_tensors(value) if isinstance(value, torch.Tensor | tuple | list | dict) else []
        yield from (tensor for tensor in tensors if not tensor.requires_grad)
