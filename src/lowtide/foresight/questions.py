"""Where Python asks for the contents of tensors: `.item()`, `if`, `float`, `tolist`.

A number that was only asked for, as `loss.item()` is for a log, can be printed, averaged and passed on. What is decided
by it is refused with its line, unless it is only checked (`checks.py`).
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from lowtide import _torch
from lowtide.foresight.checks import choosing
from lowtide.foresight.packed import lengths, padded

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.foresight.answers import Answers
    from lowtide.foresight.ledger import Ledger


class Questions(TorchFunctionMode):
    """Stands between the step and the contents of tensors, where Python asks for them."""

    def __init__(self, answers: Answers, ledger: Ledger) -> None:
        super().__init__()
        self._answers, self._ledger, self._twin = answers, ledger, ledger.adopt

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _torch.PAD_PACKED:
            return self._padded(*args)
        if func == _torch.SET_DATA and not _torch.is_fake(args[0]):
            return self._exchange(*args)
        asked = _QUESTIONS.get(func)
        if asked is None:
            out = func(*args, **(kwargs or {}))
            if any(map(_is_unknown, args)) or (kwargs and any(map(_is_unknown, kwargs.values()))):
                self._answers.forget(args[0] if out is None else out)
            return out
        tensor = args[0] if _torch.is_fake(args[0]) else self._twin(args[0])
        if asked == "array":  # that of a fake tensor would point nowhere
            return self._answers.array(tensor, func, args[1:], kwargs or {})
        if asked == "list":
            return self._answers.numbers(tensor)
        if asked == "text":
            return func(tensor, *args[1:]) if tensor.dim() else self._shown(tensor).__format__(*args[1:])
        value = self._answers.value(tensor)
        if value is not None:
            return func(tensor)  # what it assumes is noted there
        if asked == "item":
            return Unknown(self._answers)
        if asked == "float":
            return float(Unknown(self._answers))
        if asked == "bool":
            return self._answers.truth("it decides by the contents of a tensor")
        raise self._answers.refusal("it decides by the contents of a tensor")

    def _shown(self, tensor: Tensor) -> Any:
        """A number as it is put into a text."""
        if self._answers.value(tensor) is not None:
            return tensor.item()
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _exchange(self, tensor: Tensor, data: Tensor) -> None:
        """`tensor.data = data` for a real tensor: its twin has the data from here on, and it stays what it is."""
        twin = self._twin(tensor)
        self._ledger.let_go(tensor)
        twin.data = data if _torch.is_fake(data) else self._twin(data)

    def _padded(self, data: Tensor, batch_sizes: Tensor, *settings: Any) -> Any:
        known = self._answers.value(batch_sizes if _torch.is_fake(batch_sizes) else self._twin(batch_sizes))
        if known is None:
            raise self._answers.refusal("the lengths of packed sequences depend on contents")
        with _torch.on_real_tensors():
            rows = known.tolist()
        return padded(data, rows, *settings), torch.tensor(lengths(rows))


_QUESTIONS = {
    torch.Tensor.item: "item",
    torch.Tensor.__float__: "float",
    torch.Tensor.__bool__: "bool",
    torch.Tensor.__int__: "int",
    torch.Tensor.__index__: "int",
    torch.Tensor.tolist: "list",
    torch.Tensor.__format__: "text",
    torch.Tensor.numpy: "array",
    torch.Tensor.__array__: "array",  # NumPy asks for it itself
}


def _is_unknown(thing: Any, depth: int = 3) -> bool:
    """Whether it is a number that nobody knows, or has one inside: C++ code would read it for what it seems to be."""
    if type(thing) is Unknown:
        return True
    return depth > 0 and type(thing) in (list, tuple) and any(_is_unknown(item, depth - 1) for item in thing)


_BY_NUMBER = "it decides by a number from a tensor"


class Unknown(float):
    """A number that nobody knows, taken as 1. It may be printed, averaged, passed on, and compared in checks."""

    _answers: Answers
    _last: ClassVar[Answers]

    def __new__(cls, given: Answers | float) -> Unknown:
        """A number that `given` knows nothing of, or one of this kind made from `given`, as by `statistics.mean`."""
        self = super().__new__(cls, 1.0)
        if isinstance(given, numbers.Number):
            self._answers = cls._last
        else:
            cls._last = self._answers = given  # type: ignore[assignment]
        return self

    def _decided(self, *_: object) -> NoReturn:
        raise self._answers.refusal(_BY_NUMBER)

    def _compared(self, *_: object) -> bool:
        return self._answers.truth(_BY_NUMBER)

    def __gt__(self, other: object) -> bool:
        """`max` and `min` give what nobody knows: this."""
        return choice == "max" if (choice := choosing()) else self._compared()

    def __lt__(self, other: object) -> bool:
        return choice == "min" if (choice := choosing()) else self._compared()

    __le__ = __ge__ = _compared
    __int__ = __index__ = _decided
    __floor__ = __ceil__ = __trunc__ = _decided
    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        return True if other is self else self._answers.truth(_BY_NUMBER)

    def __ne__(self, other: object) -> bool:
        return False if other is self else self._answers.truth(_BY_NUMBER)

    def __bool__(self) -> bool:
        return self._answers.truth(_BY_NUMBER)

    def __float__(self) -> float:
        self._answers.note("a number from a tensor is taken as 1.0")
        return 1.0

    def _computed(self, *_: object) -> Unknown:
        return Unknown(self._answers)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __mod__ = __floordiv__ = _computed

    __round__ = _computed  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (1.0,)

    def __deepcopy__(self, memo: object) -> Unknown:
        return self
