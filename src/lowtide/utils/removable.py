"""What is put on a model and taken off again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Removable(ABC):
    """Taken off by `remove()`, or by the end of a `with` block."""

    @abstractmethod
    def remove(self) -> None:
        """Leave everything as it was before. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()
