"""Run a script as one of several processes on real tensors, where the other processes do not exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest.mock import patch

from lowtide.estimator.cuda.process_groups import list_ddp_stand_ins, simulated_group

if TYPE_CHECKING:
    from lowtide.estimator.absent_processes import AbsentProcesses


@contextlib.contextmanager
def as_one_of(processes: AbsentProcesses | None) -> Iterator[None]:
    """Within this block, let a script run as one of `processes`, while the other processes do not exist.

    The script may start a process group, which is simulated, and finds the environment variables of torchrun. Without
    `processes`, nothing changes.
    """
    if processes is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(processes.around())
        for owner, name, function in (*simulated_group(processes), *list_ddp_stand_ins()):
            stack.enter_context(patch.object(owner, name, function))
        yield
