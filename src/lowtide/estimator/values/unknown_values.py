"""Unknown numbers and arrays: the results when Python code reads contents that a fake tensor does not have.

They may be printed, averaged and passed on, and any result computed from them is unknown, too. A decision by an unknown
number raises an error, except in checks (`query_purpose.py`). An unknown number gets a value only if code requires a
plain number or array, and a note says so.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from lowtide.estimator.values.query_purpose import choosing, is_only_reported, is_scoring, is_searching

if TYPE_CHECKING:
    from lowtide.estimator.values.assumptions import Assumptions

_BY_NUMBER = "it decides by a number from a tensor"


class Unknown(float):
    """An unknown number. It counts as 1, and can be printed, averaged, passed on, and compared in checks."""

    _answers: Assumptions
    _last: ClassVar[Assumptions]

    def __new__(cls, given: Assumptions | float) -> Unknown:
        """Create an unknown number. `given` is the Assumptions object that answers comparisons of the number.

        A plain number, which `statistics.mean` passes to convert its result, becomes an unknown number, too.
        """
        self = super().__new__(cls, 1.0)
        if isinstance(given, numbers.Number):
            self._answers = cls._last
        else:
            cls._last = self._answers = given  # type: ignore[assignment]
        return self

    def _refuse(self, *_: object) -> NoReturn:
        raise self._answers.refusal(_BY_NUMBER)

    def __gt__(self, other: object) -> bool:
        """Return an unknown result. Inside `max` and `min`, return the result that makes them choose this number."""
        return choice == "max" if (choice := choosing()) else self._make_unknown()  # type: ignore[return-value]

    def __lt__(self, other: object) -> bool:
        return choice == "min" if (choice := choosing()) else self._make_unknown()  # type: ignore[return-value]

    __index__ = _refuse
    __floor__ = __ceil__ = __trunc__ = _refuse
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
        return assume_whole_number(self._answers)

    def _make_unknown(self, *_: object) -> Unknown:
        return Unknown(self._answers)

    __le__ = __ge__ = _make_unknown  # type: ignore[assignment]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _make_unknown
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __mod__ = __floordiv__ = _make_unknown

    __round__ = _make_unknown  # type: ignore[assignment]

    def item(self) -> Unknown:
        """Return this unknown number itself, like `item` of NumPy's numbers."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (1.0,)

    def __deepcopy__(self, memo: object) -> Unknown:
        return self


def assume_whole_number(answers: Assumptions) -> int:
    """Return 1 as the `int` of an unknown number that is only counted or reported, and note that in `answers`.

    Raises DataDependentStepError if the number is used in another way.
    """
    if not is_only_reported():
        raise answers.refusal(_BY_NUMBER)
    answers.note("a number from a tensor is taken as 1")
    return 1


class UnknownArray(np.ndarray[Any, Any]):
    """An array of unknown numbers, which count as 1. Code that needs a plain array gets an array of ones."""

    _answers: Assumptions

    def __array_finalize__(self, source: object) -> None:
        if isinstance(source, UnknownArray):
            self._answers = source._answers
            self._answers.arrays[id(self)] = self

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        given = {name: _to_plain(value) for name, value in kwargs.items()}
        with np.errstate(all="ignore"):
            result = getattr(ufunc, method)(*map(_to_plain, inputs), **given)
        targets = kwargs.get("out", ())
        return self._unknown(result) if not targets else targets[0] if len(targets) == 1 else targets

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _SIZED or (func is np.where and len(args) == 1):
            self._refuse_size(f"the size of what numpy.{func.__name__} gives depends on contents")
        given = {name: _to_plain(value) for name, value in kwargs.items()}
        with np.errstate(all="ignore"):
            result = func(*map(_to_plain, args), **given)
        return Unknown(self._answers) if func in _COMPARING else self._unknown(result)

    def _unknown(self, result: Any) -> Any:
        """Mark the numbers in `result`, which was computed from this array, as unknown."""
        if isinstance(result, tuple | list):
            return type(result)(map(self._unknown, result))
        if isinstance(result, np.ndarray):
            return mark_unknown(result, self._answers)
        return Unknown(self._answers) if isinstance(result, np.generic) else result

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, UnknownArray) and part.dtype == np.bool_ for part in parts):
            self._refuse_size("how many elements it takes depends on a mask")
        return self._unknown(_to_plain(self)[_to_plain(key)])

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __contains__(self, item: object) -> bool:
        return self._answers.truth(_BY_NUMBER)

    def __bool__(self) -> bool:
        return self._answers.truth(_BY_NUMBER) if self.size == 1 else bool(_to_plain(self))

    def __int__(self) -> int:
        return assume_whole_number(self._answers)

    def __index__(self) -> int:
        raise self._answers.refusal(_BY_NUMBER)

    def item(self, *place: Any) -> Any:
        """Return one element."""
        return self._unknown(np.asarray(_to_plain(self).item(*place))[()])

    def tolist(self) -> Any:
        """Return the elements as nested lists."""
        return (
            [part.tolist() if isinstance(part, UnknownArray) else part for part in self] if self.ndim else self.item()
        )

    def _find_extremum(self, *args: Any, **kwargs: Any) -> Any:
        """Return an index, marked as unknown, as the result of `argmax` and `argmin`."""
        return self._unknown(_to_plain(self).argmax(*map(_to_plain, args), **kwargs))

    argmax = argmin = _find_extremum

    def nonzero(self) -> Any:
        return np.nonzero(self)

    def _refuse_size(self, why: str) -> None:
        """Raise DataDependentStepError for a size that depends on contents, except in scikit-learn's metrics.

        Scores of these metrics never become sizes.
        """
        if not is_scoring():
            raise self._answers.refusal(why)

    def __reduce__(self) -> Any:
        return _to_plain(self).__reduce__()


def mark_unknown(array: np.ndarray[Any, Any], answers: Assumptions) -> UnknownArray:
    """Return a view of `array` whose numbers count as unknown. `answers` answers comparisons of them."""
    view = array.view(UnknownArray)
    view._answers = answers
    answers.arrays[id(view)] = view
    return view


def is_unknown(obj: Any, depth: int = 3) -> bool:
    """Return True if `obj` is an unknown number or array, or a list or tuple that contains one.

    `depth` is the number of nested levels to search. C++ code would read an unknown number as its placeholder, 1.
    """
    if type(obj) in (Unknown, UnknownArray):
        return True
    return depth > 0 and type(obj) in (list, tuple) and any(is_unknown(item, depth - 1) for item in obj)


def _to_plain(obj: Any) -> Any:
    """Convert unknown arrays in `obj` to plain arrays, and unknown numbers to 1.0, for NumPy's own code."""
    if isinstance(obj, UnknownArray):
        return obj.view(np.ndarray)
    if isinstance(obj, Unknown):
        return 1.0
    return type(obj)(map(_to_plain, obj)) if type(obj) in (list, tuple) else obj


_SIZED = frozenset(
    {
        *(np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.extract, np.compress, np.trim_zeros),
        *(np.union1d, np.intersect1d, np.setdiff1d, np.setxor1d, np.bincount, np.repeat, np.delete),
    }
)
"""Functions that return arrays whose size depends on contents."""

_COMPARING = frozenset({np.allclose, np.array_equal, np.array_equiv})
"""Functions that return True or False."""
