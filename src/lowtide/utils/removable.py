"""Changes to a model that can be undone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Removable(ABC):
    """Base class of changes that `remove()`, or the end of a `with` block, undoes."""

    @abstractmethod
    def remove(self) -> None:
        """Undo the change. Further calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
