"""Numbers and arrays that nobody knows: what Python code gets where it asks for what a fake tensor does not have.

They may be printed, averaged and passed on, and what is computed from them is unknown, too. What is decided by them is
refused, unless it is only checked (`query_purpose.py`). Each is taken as something where only a plain number or array
will do; then, or when it is made, that is noted.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from lowtide.estimator.values.query_purpose import choosing, is_scoring, is_searching, is_telling

if TYPE_CHECKING:
    from lowtide.estimator.values.assumptions import ValueOracle

_BY_NUMBER = "it decides by a number from a tensor"


class Unknown(float):
    """A number that nobody knows, taken as 1. It may be printed, averaged, passed on, and compared in checks."""

    _answers: ValueOracle
    _last: ClassVar[ValueOracle]

    def __new__(cls, given: ValueOracle | float) -> Unknown:
        """A number that `given` knows nothing of, or one of this kind made from `given`, as by `statistics.mean`."""
        self = super().__new__(cls, 1.0)
        if isinstance(given, numbers.Number):
            self._answers = cls._last
        else:
            cls._last = self._answers = given  # type: ignore[assignment]
        return self

    def _decided(self, *_: object) -> NoReturn:
        raise self._answers.refusal(_BY_NUMBER)

    def __gt__(self, other: object) -> bool:
        """`max` and `min` give what nobody knows: this. What else is compared is asked for where it is decided by."""
        return choice == "max" if (choice := choosing()) else self._computed()  # type: ignore[return-value]

    def __lt__(self, other: object) -> bool:
        return choice == "min" if (choice := choosing()) else self._computed()  # type: ignore[return-value]

    __index__ = _decided
    __floor__ = __ceil__ = __trunc__ = _decided
    __hash__ = float.__hash__

    def __eq__(self, other: object) -> bool:
        return True if other is self else self._answers.truth(_BY_NUMBER)

    def __ne__(self, other: object) -> bool:
        return False if other is self else self._answers.truth(_BY_NUMBER)

    def __bool__(self) -> bool:
        return self._answers.truth(_BY_NUMBER)

    def __float__(self) -> float:
        if is_searching():
            return self._answers.falling()
        if not is_scoring():
            self._answers.note("a number from a tensor is taken as 1.0")
        return 1.0

    def __int__(self) -> int:
        return whole_number(self._answers)

    def _computed(self, *_: object) -> Unknown:
        return Unknown(self._answers)

    __le__ = __ge__ = _computed  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __mod__ = __floordiv__ = _computed

    __round__ = _computed  # type: ignore[assignment]

    def item(self) -> Unknown:
        """As NumPy's numbers have it."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (1.0,)

    def __deepcopy__(self, memo: object) -> Unknown:
        return self


def whole_number(answers: ValueOracle) -> int:
    """What `int` gives of a number that nobody knows: refused, but where it is only counted or told."""
    if not is_telling():
        raise answers.refusal(_BY_NUMBER)
    answers.note("a number from a tensor is taken as 1")
    return 1


class UnknownArray(np.ndarray[Any, Any]):
    """An array of numbers that nobody knows, taken as 1. Code that wants a plain array gets that of ones."""

    _answers: ValueOracle

    def __array_finalize__(self, source: object) -> None:
        if isinstance(source, UnknownArray):
            self._answers = source._answers
            self._answers.arrays[id(self)] = self

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        given = {name: _plain(value) for name, value in kwargs.items()}
        with np.errstate(all="ignore"):
            found = getattr(ufunc, method)(*map(_plain, inputs), **given)
        targets = kwargs.get("out", ())
        return self._unknown(found) if not targets else targets[0] if len(targets) == 1 else targets

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _SIZED or (func is np.where and len(args) == 1):
            self._sizes(f"the size of what numpy.{func.__name__} gives depends on contents")
        given = {name: _plain(value) for name, value in kwargs.items()}
        with np.errstate(all="ignore"):
            found = func(*map(_plain, args), **given)
        return Unknown(self._answers) if func in _COMPARING else self._unknown(found)

    def _unknown(self, found: Any) -> Any:
        """What was computed from this."""
        if isinstance(found, tuple | list):
            return type(found)(map(self._unknown, found))
        if isinstance(found, np.ndarray):
            return unknown_array(found, self._answers)
        return Unknown(self._answers) if isinstance(found, np.generic) else found

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, UnknownArray) and part.dtype == np.bool_ for part in parts):
            self._sizes("how many elements it takes depends on a mask")
        return self._unknown(_plain(self)[_plain(key)])

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __contains__(self, item: object) -> bool:
        return self._answers.truth(_BY_NUMBER)

    def __bool__(self) -> bool:
        return self._answers.truth(_BY_NUMBER) if self.size == 1 else bool(_plain(self))

    def __int__(self) -> int:
        return whole_number(self._answers)

    def __index__(self) -> int:
        raise self._answers.refusal(_BY_NUMBER)

    def item(self, *place: Any) -> Any:
        """One of its numbers."""
        return self._unknown(np.asarray(_plain(self).item(*place))[()])

    def tolist(self) -> Any:
        """Its numbers in lists."""
        return (
            [part.tolist() if isinstance(part, UnknownArray) else part for part in self] if self.ndim else self.item()
        )

    def _choice(self, *args: Any, **kwargs: Any) -> Any:
        """The place of its largest or smallest number."""
        return self._unknown(_plain(self).argmax(*map(_plain, args), **kwargs))

    argmax = argmin = _choice

    def nonzero(self) -> Any:
        return np.nonzero(self)

    def _sizes(self, why: str) -> None:
        """Sizes are asked for: refused, but for a score, which is a number in any case."""
        if not is_scoring():
            raise self._answers.refusal(why)

    def __reduce__(self) -> Any:
        return _plain(self).__reduce__()


def unknown_array(array: np.ndarray[Any, Any], answers: ValueOracle) -> UnknownArray:
    """The same array, whose numbers nobody knows."""
    found = array.view(UnknownArray)
    found._answers = answers
    answers.arrays[id(found)] = found
    return found


def is_unknown(thing: Any, depth: int = 3) -> bool:
    """Whether nobody knows it, or something inside: C++ code would read that for what it seems to be."""
    if type(thing) in (Unknown, UnknownArray):
        return True
    return depth > 0 and type(thing) in (list, tuple) and any(is_unknown(item, depth - 1) for item in thing)


def _plain(thing: Any) -> Any:
    """As NumPy's own code is to see it."""
    if isinstance(thing, UnknownArray):
        return thing.view(np.ndarray)
    if isinstance(thing, Unknown):
        return 1.0
    return type(thing)(map(_plain, thing)) if type(thing) in (list, tuple) else thing


_SIZED = frozenset(
    {
        *(np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.extract, np.compress, np.trim_zeros),
        *(np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d, np.bincount, np.repeat, np.delete),
    }
)
"""Functions that give arrays of a size that depends on contents."""

_COMPARING = frozenset({np.allclose, np.array_equal, np.array_equiv})
"""Functions that give yes or no."""
