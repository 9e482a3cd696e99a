"""Known and assumed contents of fake tensors.

Models branch on contents, such as masks, padding and the number of optimizer steps. Contents that come from the batch,
from buffers and from constants alone are **known**: small operators on known tensors also run on real ones. Two kinds
of contents are **assumed**, and noted with the line of code that reads them. First, the step goes well: nothing is NaN
or infinite, a gradient scaler finds no overflow, checks pass and training continues (`branch_rules.py`). Second, a
router sends equally many tokens to each expert. Any other read of contents raises an error that names the line.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch.backward import in_forward_mode
from lowtide._torch.fake_modes import SENDING_OPERATORS, is_fake, is_strided, on_real_tensors
from lowtide._torch.operators import draws, find_written_arguments, op_name
from lowtide._torch.pytree import tree_leaves, tree_map
from lowtide._torch.tensors import get_storage_id
from lowtide.estimator.op_sets import (
    ALL_OR_ANY,
    BY_INTEGERS,
    BY_SHAPE,
    CHOICES,
    COMPARING,
    EMPTY,
    GATHERING,
    INDEXING,
    LESS,
    MORE,
    NORMED_BY_BATCH,
    NOT_IN_HEALTH,
    PACKING,
    PUTTING,
    RUNNING,
    TRAINING,
)
from lowtide.estimator.values import known_values as contents
from lowtide.estimator.values.assumptions import SEARCHING, Assumptions
from lowtide.estimator.values.query_purpose import in_optimizer, is_counted, is_searching
from lowtide.estimator.values.query_site import asked_by_loader
from lowtide.estimator.values.unknown_values import Unknown, mark_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lowtide._torch.fake_modes import FakeTensorMode

aten = torch.ops.aten

_CPU = torch.device("cpu")

LARGEST_KNOWN = 2**20
"""Largest number of elements of an integer or boolean tensor with known contents: a batch of tokens, a mask."""
LARGEST_KNOWN_FLOAT = 2**17

LARGEST_ASKED = 2**26
"""Largest number of elements of a batch that is searched for NaN and infinity."""

_AS_NUMBER = (aten._local_scalar_dense.default, aten.item.default)
"""Operators that `.item()` calls. The second is seen only for inference-mode tensors; otherwise it calls the first."""

HEALTH = "no NaN or infinity"
DRAWN = "random numbers are as they were drawn"
EVENLY = "choices made here by the largest value are assumed to be spread evenly"

RECEIVING = frozenset(
    {
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_gather_into_tensor_out",
        "all_to_all_single",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    }
)
"""Operators of `SENDING_OPERATORS` whose results other processes fill. Results of others keep their own contents."""

_LEFT_REAL = "_lowtide_left_real"


class ValueOracle(Assumptions):
    """Source of the contents of fake tensors: known contents if there are any, else assumptions."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self._fakes = fakes
        self._generators: dict[torch.Generator, torch.Generator] = {}
        self.written: set[int] = set()
        """Storages to which operators have written since a caller cleared the set."""

    # --- known contents

    def introduce(self, fake: Tensor, real: Tensor) -> None:
        """Set a fake tensor's contents to those of its real tensor. Parameters are skipped: the step changes them."""
        if real.requires_grad or real.device.type == "meta" or contents.is_met(fake):
            return
        if self.arrays and real.data_ptr() in {array.ctypes.data for array in self.arrays.values()}:
            return  # `torch.from_numpy`, which no mode sees
        if not is_strided(real) or real.untyped_storage().nbytes() == fake.untyped_storage().nbytes():
            contents.borrow(fake, real)
        elif _is_small(real):  # a slice of a larger tensor; only the slice is on the GPU
            self.learn(fake, real.detach().cpu())

    def array(self, tensor: Tensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the array that `func` creates from a fake tensor's contents; if unknown, an array of unknown numbers.

        The array is read-only if its memory is too large to copy.
        """
        with on_real_tensors():
            value = contents.writable(tensor)
            if value is None and not contents.is_known(tensor):
                self.note("the numbers of an array, which are not known, are taken as 1")
                one = torch.ones((), dtype=tensor.dtype)
                ones = one.expand(tensor.shape)
                is_small = ones.numel() * ones.itemsize <= contents.LARGEST_COPIED
                array = func(ones.clone() if is_small else ones, *args, **kwargs)
                if not is_small:
                    array.setflags(write=False)  # an expanded array has one number for all elements
                return mark_unknown(array, self)
            self._note_assumed(tensor)
            if value is not None:
                return func(value, *args, **kwargs)
            value = contents.value(tensor)
            array = func(value, *args, **kwargs)
            array.setflags(write=False)  # memory of a real tensor that is too large to be copied
            return array

    def numbers(self, tensor: Tensor) -> Any:
        """Return a fake tensor's contents as nested lists. If they are unknown, the lists contain unknown numbers."""
        value = self.value(tensor)
        if value is None:
            return _nest(tuple(tensor.shape), Unknown(self))
        self._note_assumed(tensor)
        with on_real_tensors():
            return value.tolist()

    def is_score(self, tensor: Tensor) -> bool:
        """Return True for a tensor that only rates predictions, such as an accuracy, and is no count of elements."""
        return contents.assumed(tensor) == EVENLY and (tensor.dtype.is_floating_point or is_counted())

    def pass_on(self, tensor: Tensor, copy: Tensor) -> None:
        """Set the contents of `copy` to those of `tensor`, known or unknown."""
        with on_real_tensors():
            contents.share(tensor, copy)

    def forget(self, tensors: Any) -> None:
        """Mark the contents of these tensors as unknown, after unknown numbers were written to them."""
        for tensor in tree_leaves(tensors):
            if is_fake(tensor):
                contents.forget(tensor)

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return a fake tensor's contents if known. The caller must not write to the returned tensor."""
        with on_real_tensors():
            return contents.value(tensor)

    def learn(self, tensor: Tensor, value: Tensor, assumed: str = "") -> None:
        """Set the known contents of a fake tensor."""
        with on_real_tensors():
            contents.learn(tensor, value, assumed)

    # --- operators

    def before(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[bool, Any]:
        """Return (True, result) if the result of an operator is known before it runs, else (False, None).

        In the arguments of indexing operators, known masks are replaced by integer indices.
        """
        if func in _AS_NUMBER:
            return True, self._read_number(args[0])
        if func in COMPARING:
            return True, self._compare(func, args, kwargs, tensors)
        if torch.Tag.dynamic_output_shape not in func.tags and func not in BY_INTEGERS:
            return False, None
        if func in INDEXING:
            return self._replace_masks(func, args, kwargs)
        if func is aten.masked_select.default:
            return self._select(*args)
        for tensor in tensors:
            if contents.is_known(tensor):
                self._note_assumed(tensor)
            elif not (func in BY_INTEGERS and tensor.dtype.is_floating_point):
                raise self.refusal(f"the size of what {op_name(func)} gives depends on contents")
        real = self._run(func, args, kwargs)
        device = tensors[0].device

        def fake_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if func is PACKING and value.dtype is torch.long:
                return mark_real(value)  # rows of each step: recurrent layers, and backward, read its memory
            fake = self._make_fake_like(value, device)
            if not value.dtype.is_floating_point and _is_small(value):
                self.learn(fake, value)
            return fake

        return True, tree_map(fake_of, real)

    def _compare(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
        if not all(map(contents.is_known, tensors)):
            return self.truth("it compares tensors")
        for tensor in tensors:
            self._note_assumed(tensor)
        return bool(self._run(func, args, kwargs))

    def count_mask_index_bytes(self, func: Any, args: Any) -> list[int]:
        """Return the bytes of the integer index that the kernel computes from each known mask among the indices.

        aten/src/ATen/native/IndexingUtils.h: expandTensors. If a single number is written, the kernel fills instead
        (TensorAdvancedIndexing.cpp: _index_put_impl_). torch 2.13.
        """
        if func not in INDEXING and func not in PUTTING:
            return []
        is_filled = func in PUTTING and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        if is_filled or not _has_mask(args[1]):
            return []
        masks = [self.value(index) for index in args[1] if index is not None and index.dtype in _MASKS]
        with on_real_tensors():
            return [int(mask.count_nonzero()) * mask.dim() * torch.long.itemsize for mask in masks if mask is not None]

    def _replace_masks(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Replace known masks among the indices `args[1]` by integer indices, so that the number of rows is known.

        Return (False, None), because the operator still has to run. Raises DataDependentStepError for an unknown mask.
        """
        if not _has_mask(args[1]):
            return False, None
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in _MASKS:
                indices.append(index)
                continue
            mask = self.value(index)
            if mask is None:
                raise self.refusal("how many elements it takes depends on a mask")
            self._note_assumed(index)
            with on_real_tensors():
                numbers = mask.nonzero().unbind(1)
            for number in numbers:
                fake = self._make_fake_like(number, index.device)
                self.learn(fake, number, contents.assumed(index))
                indices.append(fake)
        args[1][:] = indices
        return False, None

    def _select(self, tensor: Tensor, mask: Tensor) -> tuple[bool, Any]:
        """Return True and the result of `masked_select`, which has the selected number of elements.

        The contents of the result are unknown. Raises DataDependentStepError for an unknown mask.
        """
        chosen = self.value(mask)
        if chosen is None:
            raise self.refusal("how many elements it takes depends on a mask")
        self._note_assumed(mask)
        with on_real_tensors():
            count = int(chosen.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())  # type: ignore[no-untyped-call]
        with self._fakes:
            return True, torch.empty(count, dtype=tensor.dtype, device=tensor.device)

    def after(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], results: list[Tensor]) -> None:
        """Record the contents of an operator's results, and of the tensors to which it has written."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            for gradient in args[0]:
                contents.forget(gradient)
            return  # its `found_inf` stays as it was, 0
        if func.namespace in SENDING_OPERATORS:  # never run, as that would send
            for given, tensor in zip(tensors, results, strict=False):
                if op_name(func) in RECEIVING:
                    contents.receive(tensor, func.name())
                elif not contents.is_met(tensor):
                    self.pass_on(given, tensor)
            return
        targets = _list_targets(find_written_arguments(func), args, kwargs)
        self.written.update(map(get_storage_id, targets))
        changes = targets or not all(map(contents.is_known, results))
        if changes and self._is_worth(func, tensors, results) and self._compute(func, args, kwargs, targets, results):
            return
        if func in NORMED_BY_BATCH and args[TRAINING]:
            targets += _list_targets(RUNNING, args, kwargs)
        for target in targets:
            contents.forget(target)
        verdict = self._assume_healthy(func, args, tensors)
        goes_on = None if verdict is not None else _assume_continues(func, args)
        with on_real_tensors():
            if verdict is not None:
                contents.learn_alike(results[0], torch.tensor(verdict), HEALTH)
            elif goes_on is not None:
                contents.learn_alike(results[0], torch.tensor(goes_on), SEARCHING)
            elif func in CHOICES and _is_small(results[-1]) and (count := _count_candidates(func, args)):
                contents.learn(results[-1], _assume_balanced(results[-1], count), EVENLY)

    def _is_worth(self, func: Any, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
        """Return True if an operator can run on its arguments' contents: known, small, and outside forward-mode AD."""
        if in_forward_mode() or func is aten._efficientzerotensor.default:  # can't be copied
            return False
        if func in NOT_IN_HEALTH and contents.is_known(tensors[0]):
            return tensors[0].numel() <= LARGEST_ASKED  # a batch may contain NaN
        if func in BY_SHAPE:
            tensors = ()
        elif func in GATHERING:
            tensors = tensors[1:] if contents.is_known(tensors[0]) else tensors
        return all(_is_small(t) and contents.is_known(t) for t in tensors) and all(map(_is_small, results))

    def _compute(self, func: Any, args: Any, kwargs: Any, targets: list[Tensor], results: list[Tensor]) -> bool:
        """Run an operator on the contents of its arguments, record its results, and return True.

        Return False, without any effect, if the operator can't run: assumed contents may be invalid, such as an index
        that is too large, and some operators exist only on GPUs.
        """
        given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        assumed = DRAWN if draws(func) else next(filter(None, map(contents.assumed, given)), "")
        with on_real_tensors():
            written = {id(target): contents.writable(target, assumed) for target in targets}
        if any(target is None for target in written.values()):
            return False
        try:
            real = self._run(func, args, kwargs, written)
        except (RuntimeError, IndexError, ValueError) as error:
            is_for_gpus = isinstance(error, NotImplementedError) and any(fake.device != _CPU for fake in results)
            if not (assumed or is_for_gpus):
                raise
            return False
        values = [leaf for leaf in tree_leaves(real) if isinstance(leaf, torch.Tensor)]
        if func in EMPTY:
            for value in values:
                value.zero_()  # so that all rehearsals draw the same numbers
        for fake, value in zip(results, values, strict=False):
            if fake.shape == value.shape and not contents.is_known(fake):
                self.learn(fake, value, assumed)
        return True

    def _make_fake_like(self, real: Tensor, device: torch.device) -> Tensor:
        with self._fakes:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)

    def _assume_healthy(self, func: Any, args: Any, tensors: list[Tensor]) -> bool | None:
        """Return the result of a test for NaN or infinity, assuming that there are none; None for other operators."""
        if func in NOT_IN_HEALTH:
            return False
        if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[-1]:
            return func is aten.eq.Tensor
        if func in (aten.eq.Scalar, aten.ne.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
            return func is aten.ne.Scalar
        if func in ALL_OR_ANY and len(tensors) == 1:
            return contents.alike(tensors[0], HEALTH)
        return None

    def _run(self, func: Any, args: Any, kwargs: Any, written: dict[int, Tensor | None] | None = None) -> Any:
        """Run an operator on the contents of its arguments.

        `written` maps the id of each fake tensor to which the operator writes to the tensor's contents.
        """
        targets = written or {}
        borrowed: set[int] = set()

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return _CPU  # all contents are on the CPU
            if isinstance(leaf, torch.Generator):
                return self._copy_generator(leaf)
            if not isinstance(leaf, torch.Tensor):
                return leaf
            value = targets.get(id(leaf))
            if value is None:
                value = self.value(leaf)
            if value is None:
                return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)  # only the shape of this argument matters
            borrowed.add(get_storage_id(value))
            return value

        def own(leaf: Any) -> Any:
            is_borrowed = isinstance(leaf, torch.Tensor) and get_storage_id(leaf) in borrowed
            return leaf.clone() if is_borrowed else leaf

        with on_real_tensors():
            out = func(*tree_map(real, args), **tree_map(real, kwargs))
            return out if targets else tree_map(own, out)

    def _copy_generator(self, generator: torch.Generator) -> torch.Generator:
        """Return a copy of the script's `generator`, which draws the same numbers without advancing the original."""
        copy = self._generators.get(generator)
        if copy is None:
            copy = self._generators[generator] = (
                generator.clone_state() if generator.device == _CPU else torch.Generator().manual_seed(0)
            )
        return copy

    # --- queries

    def _read_number(self, tensor: Tensor) -> Any:
        value = self.value(tensor)
        if value is None and tensor.dtype is torch.bool:
            return self.truth("it asks for a number that depends on contents")
        if value is None and tensor.dtype.is_floating_point and in_optimizer():
            self.note("a number that an optimizer computes with is taken as 1.0")
            return 1.0
        if value is None:
            raise self.refusal("it asks for a number that depends on contents")
        self._note_assumed(tensor)
        with on_real_tensors():
            return value.item()

    def _note_assumed(self, tensor: Tensor) -> None:
        assumed = contents.assumed(tensor)
        # a batch's rows are chosen at random anyway
        if assumed and not (assumed == DRAWN and asked_by_loader()):
            self.note(assumed)


_MASKS = (torch.bool, torch.uint8)


def _list_targets(writes: tuple[int | str, ...], args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors to which an operator writes, by the argument positions or names in `writes`."""
    places = (kwargs.get(p) if isinstance(p, str) else args[p] if p < len(args) else None for p in writes)
    return [leaf for place in places for leaf in tree_leaves(place) if isinstance(leaf, torch.Tensor)]


def _count_candidates(func: Any, args: Any) -> int:
    """Return the size of the dimension in which topk, argmax or max chooses, such as the number of experts.

    Return 0 if no dimension is given, or if the tensor is a scalar.
    """
    place = 2 if func is aten.topk.default else 1
    dim = args[place] if len(args) > place else -1 if func is aten.topk.default else None
    return 0 if dim is None or not args[0].dim() else int(args[0].shape[dim])


def _assume_balanced(choices: Tensor, count: int) -> Tensor:
    """Return indices of the shape of `choices` in which each of `count` candidates appears equally often."""
    return (torch.arange(choices.numel()) % count).view(choices.shape)


def _assume_continues(func: Any, args: Any) -> bool | None:
    """Return the assumed result of a comparison in LBFGS with which its search continues; None for any other call.

    Steps and gradients are assumed to be larger than a positive bound. If two tensors are compared, the first one is
    assumed to be smaller.
    """
    if (func not in LESS and func not in MORE) or not is_searching():
        return None
    if isinstance(args[1], torch.Tensor):
        return func in LESS
    return func in MORE and args[1] > 0


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in indices)


def _nest(shape: tuple[int, ...], number: Any) -> Any:
    """Return nested lists of this shape, with `number` as each element."""
    return [_nest(shape[1:], number) for _ in range(shape[0])] if shape else number


def mark_real(tensor: Tensor) -> Tensor:
    """Mark a tensor, and tensors detached from it, so that they stay real and are not replaced by fake ones."""
    setattr(tensor, _LEFT_REAL, True)
    return tensor


def detach_real(func: Any, args: Any) -> Tensor | None:
    """Return the result of `detach` on a tensor marked by `mark_real`; None for any other call."""
    if func is not aten.detach.default or not hasattr(args[0], _LEFT_REAL):
        return None
    with on_real_tensors():
        return mark_real(args[0].detach())


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (LARGEST_KNOWN if not tensor.dtype.is_floating_point else LARGEST_KNOWN_FLOAT)
