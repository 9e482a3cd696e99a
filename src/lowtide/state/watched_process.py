"""A lock, so that only one watcher follows the training steps of a process; and a list of watched blocks whose loops
are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from lowtide.errors import LowtideError

alone = threading.Lock()
"""Lock that is held while a program's steps are detected: a process has one recorder of memory, and one budget."""

left_over: list[Callable[[], None]] = []
"""Functions that are called before steps are detected, and before `lowtide.fit`. Each ends the block of a loop that is
over and that no callback has ended.
"""

ONE_AT_A_TIME: Final = (
    "A budget is for all memory of the process, so there is one at a time: leave one of the two out, or end the first "
    "block before."
)


def end_left_over() -> None:
    """End each watched block whose loop is over and that no callback has ended: call the functions in `left_over`."""
    for end in [*left_over]:
        end()


def forget_left_over(end: Callable[[], None]) -> None:
    """Remove `end` from the functions in `left_over`."""
    left_over[:] = [function for function in left_over if function != end]


def check_not_watched() -> None:
    """Raise LowtideError if the training steps of this process are watched, because `lowtide.fit` can't run then."""
    end_left_over()
    if alone.locked():
        raise LowtideError(
            "lowtide.fit can't be called while the training steps of this process are watched, by lowtide.within or "
            f"by a command such as `lowtide run`: its rehearsals would be taken for steps. {ONE_AT_A_TIME}"
        )
