"""What is known of the contents of fake tensors.

A model decides things by contents: whether a mask is all ones, which positions are padding, how many steps the
optimizer took. What comes from the batch, from buffers and from constants alone is **known**: small operators on known
tensors run on real ones beside. Two kinds of answers are **assumed**, and noted with the line that asked: nothing is
NaN or infinite and a gradient scaler finds no overflow, as in every step worth rehearsing; and a router sends equally
many tokens to each expert. Anything else is refused with its line.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch
from lowtide._torch import tree_leaves, tree_map
from lowtide.foresight.kinds import ALL_OR_ANY, BY_INTEGERS, BY_SHAPE, CHOICES, INDEXING, NOT_IN_HEALTH, PACKING
from lowtide.foresight.lines import Unforeseeable, where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lowtide._torch import FakeTensorMode

aten = torch.ops.aten

_CPU = torch.device("cpu")

LARGEST_KNOWN = 2**20
"""Elements of integers and booleans up to which contents are known: a batch of tokens, a mask."""
LARGEST_KNOWN_FLOAT = 2**12
LARGEST_DRAWN = 16
"""Elements of random tensors up to which they are drawn."""

HEALTH = "no NaN or infinity"
EVENLY = "experts, or whatever is chosen here, are chosen evenly"

_ATTRIBUTE = "_lowtide_known"
_LEFT_REAL = "_lowtide_left_real"


class _Known:
    """The contents of a fake tensor and what they assume; `writes`: how often its memory had been written to then."""

    __slots__ = ("assumed", "value", "writes")

    def __init__(self, value: Tensor, writes: int, assumed: str) -> None:
        self.value, self.writes, self.assumed = value, writes, assumed


class Answers:
    """Knows what can be known of fake tensors. `notes` are the answers that were assumed, each with its line."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        self._fakes = fakes
        self.notes: dict[str, None] = {}
        self.refused: Unforeseeable | None = None
        """The first question without an answer: who cleans up after it may ask more."""
        self._writes: dict[int, int] = {}

    # --- what is known

    def introduce(self, twin: Tensor, real: Tensor) -> None:
        """A twin's contents are those of the real tensor, but a parameter's: the step changes these."""
        if _known(twin) is None and not real.requires_grad and real.device.type != "meta" and _is_small(real):
            with _torch.on_real_tensors():
                self._learn(twin, real.detach())

    def pass_on(self, tensor: Tensor, copy: Tensor) -> None:
        """A copy's contents are those of its tensor."""
        known = self._fresh(tensor)
        if known is not None:
            self._learn(copy, known.value, known.assumed)

    def value(self, tensor: Tensor) -> Tensor | None:
        """The contents of a fake tensor, if they are known. Not to be written to."""
        known = self._fresh(tensor)
        return None if known is None else known.value

    def _fresh(self, tensor: Tensor) -> _Known | None:
        known = _known(tensor)
        if known is None or known.writes != self._writes.get(_torch.storage_id(tensor), 0):
            return None
        return known

    def _learn(self, tensor: Tensor, value: Tensor, assumed: str = "") -> None:
        setattr(tensor, _ATTRIBUTE, _Known(value, self._writes.get(_torch.storage_id(tensor), 0), assumed))

    # --- operators

    def before(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[bool, Any]:
        """Whether an operator is answered without running it, and with what."""
        if func is aten._local_scalar_dense.default:
            return True, self._number(args[0])
        if torch.Tag.dynamic_output_shape not in func.tags and func not in BY_INTEGERS:
            return False, None
        if func in INDEXING:
            return self._index(func, args, kwargs)
        for tensor in tensors:
            known = self._fresh(tensor)
            if known is not None:
                self._note_assumed(known)
            elif not (func in BY_INTEGERS and tensor.dtype.is_floating_point):
                raise self.refusal(f"the size of what {_name(func)} gives depends on contents")
        real = self._run(func, args, kwargs)
        device = tensors[0].device

        def made(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if func is PACKING and value.dtype is torch.long:
                return left_real(value)  # rows of each step: recurrent layers, and backward, read its memory
            fake = self._fake_like(value, device)
            if not value.dtype.is_floating_point and _is_small(value):
                self._learn(fake, value)
            return fake

        return True, tree_map(made, real)

    def _index(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Indexing by a mask gives as many rows as the mask has: as an index by numbers, if these are known."""
        if not _has_mask(args[1]):
            return False, None
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in _MASKS:
                indices.append(index)
                continue
            mask = self._fresh(index)
            if mask is None:
                raise self.refusal("how many elements it takes depends on a mask")
            self._note_assumed(mask)
            with _torch.on_real_tensors():
                numbers = mask.value.nonzero().unbind(1)
            for number in numbers:
                fake = self._fake_like(number, index.device)
                self._learn(fake, number, mask.assumed)
                indices.append(fake)
        args[1][:] = indices
        return False, None

    def after(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], made: list[Tensor]) -> None:
        """An operator has run: note what is known of its results."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            for gradient in args[0]:
                self._write(gradient)
            return  # what it found stays as it was: nothing
        writes = _torch.written_by(func)
        if not made:
            self._written(func, args, kwargs, tensors, writes)
            return
        known = [self._fresh(tensor) for tensor in tensors]
        if (all(known) or func in BY_SHAPE) and self._is_worth(func, () if func in BY_SHAPE else tensors, made):
            real = self._run(func, args, kwargs)
            assumed = next((k.assumed for k in known if k is not None and k.assumed), "")
            results = [leaf for leaf in tree_leaves(real) if isinstance(leaf, torch.Tensor)]
            self._note_writes(writes, args, kwargs)
            for fake, value in zip(made, results, strict=False):
                if fake.shape == value.shape:
                    self._learn(fake, value, assumed)
            return
        self._note_writes(writes, args, kwargs)
        verdict = self._healthy(func, args, tensors)
        with _torch.on_real_tensors():
            if verdict is not None:
                self._learn(made[0], torch.tensor(verdict).expand(made[0].shape), HEALTH)
            elif func in CHOICES and _is_small(made[-1]) and (count := _candidates(func, args)):
                self._learn(made[-1], _evenly(made[-1], count), EVENLY)

    def _written(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], writes: tuple[int | str, ...]) -> None:
        """An operator has run that gives nothing back, as those on lists of tensors in place do: step counters."""
        targets = _targets(writes, args, kwargs)
        known = [self._fresh(tensor) for tensor in tensors]
        values: list[Tensor] = []
        if all(known) and all(_is_small(tensor) for tensor in tensors):
            with _torch.on_real_tensors():
                copies = {id(t): k.value.clone() for t, k in zip(tensors, known, strict=True) if k is not None}
                args, kwargs = tree_map(lambda x: copies.get(id(x), x), (args, kwargs))
                func(*args, **kwargs)
            values = [copies[id(target)] for target in targets]
        for target in targets:
            self._write(target)
        for target, value in zip(targets, values, strict=False):
            self._learn(target, value)

    def _fake_like(self, real: Tensor, device: torch.device) -> Tensor:
        with self._fakes:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)

    def _is_worth(self, func: Any, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
        if _torch.draws(func):
            return all(tensor.numel() <= LARGEST_DRAWN for tensor in made)
        return all(_is_small(tensor) for tensor in (*tensors, *made))

    def _healthy(self, func: Any, args: Any, tensors: list[Tensor]) -> bool | None:
        """What a step without NaN and infinity would answer; None for no such question."""
        if func in NOT_IN_HEALTH:
            return False
        if func in (aten.eq.Tensor, aten.ne.Tensor) and args[0] is args[-1]:
            return func is aten.eq.Tensor
        if func in (aten.eq.Scalar, aten.ne.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
            return func is aten.ne.Scalar
        if func in ALL_OR_ANY and len(tensors) == 1:
            known = self._fresh(tensors[0])
            if known is not None and known.assumed == HEALTH and not any(known.value.stride()):
                return bool(known.value.as_strided((), ()))
        return None

    def _note_writes(self, writes: tuple[int | str, ...], args: Any, kwargs: Any) -> None:
        for target in _targets(writes, args, kwargs):
            self._write(target)

    def _write(self, tensor: Tensor) -> None:
        key = _torch.storage_id(tensor)
        self._writes[key] = self._writes.get(key, 0) + 1

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on what is known, on copies of what it writes to."""
        copy = bool(_torch.written_by(func))

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return _CPU  # where all contents are
            if not isinstance(leaf, torch.Tensor):
                return leaf
            value = self.value(leaf)
            if value is None:
                return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape)  # only its shape matters
            return value.clone() if copy else value

        with _torch.on_real_tensors():
            return func(*tree_map(real, args), **tree_map(real, kwargs))

    # --- questions

    def _number(self, tensor: Tensor) -> Any:
        known = self._fresh(tensor)
        if known is None:
            raise self.refusal("it asks for a number that depends on contents")
        self._note_assumed(known)
        with _torch.on_real_tensors():
            return known.value.item()

    def _note_assumed(self, known: _Known) -> None:
        if known.assumed:
            self.note(known.assumed)

    def note(self, what: str) -> None:
        """Something was assumed here."""
        self.notes[f"{where()}: {what}"] = None

    def refusal(self, why: str) -> Unforeseeable:
        """The error for a question without an answer, with the line that asked."""
        error = Unforeseeable(
            f"{where()}: {why}, which a rehearsal without memory can't know.\n"
            "  Measure this step instead (lowtide.timeline), or decide there by something that the batch tells."
        )
        self.refused = self.refused or error
        return error


_MASKS = (torch.bool, torch.uint8)


def _targets(writes: tuple[int | str, ...], args: Any, kwargs: Any) -> list[Tensor]:
    """What an operator writes to."""
    places = (kwargs.get(p) if isinstance(p, str) else args[p] if p < len(args) else None for p in writes)
    return [leaf for place in places for leaf in tree_leaves(place) if isinstance(leaf, torch.Tensor)]


def _candidates(func: Any, args: Any) -> int:
    """Among how many the largest are chosen; 0 if among all elements of a tensor."""
    place = 2 if func is aten.topk.default else 1
    dim = args[place] if len(args) > place else -1 if func is aten.topk.default else None
    return 0 if dim is None or not args[0].dim() else int(args[0].shape[dim])


def _evenly(choices: Tensor, count: int) -> Tensor:
    """Each of `count` equally often: the first tensor of choices of this shape that comes to mind."""
    return (torch.arange(choices.numel()) % count).view(choices.shape)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in _MASKS for index in indices)


def left_real(tensor: Tensor) -> Tensor:
    """Have a tensor, and detached ones of it, stay the real one that it is where others would be exchanged."""
    setattr(tensor, _LEFT_REAL, True)
    return tensor


def detached_real(func: Any, args: Any) -> Tensor | None:
    """The result of `detach` of such a tensor; None for all else."""
    if func is not aten.detach.default or not hasattr(args[0], _LEFT_REAL):
        return None
    with _torch.on_real_tensors():
        return left_real(args[0].detach())


def _known(tensor: Tensor) -> _Known | None:
    found: _Known | None = getattr(tensor, _ATTRIBUTE, None)
    return found


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (LARGEST_KNOWN if not tensor.dtype.is_floating_point else LARGEST_KNOWN_FLOAT)


def _name(func: Any) -> str:
    return str(func.__name__).partition(".")[0]
