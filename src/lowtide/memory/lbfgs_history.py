"""Memory of L-BFGS, whose state grows from update to update: the bytes held now, and by how much they will still grow.

The optimizer keeps `history_size` pairs of vectors as large as the parameters, which are added one by one, with two
numbers each. While it evaluates the model it holds more vectors in variables, and in its first update all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from lowtide.memory.frame_locals import local_variables
from lowtide.units import format_bytes
from lowtide.utils.frames import module_name, walk_frames

if TYPE_CHECKING:
    from torch.optim import Optimizer

_IN_AN_EVALUATION: Final = 4
"""Number of vectors in addition to the pairs while the model is evaluated: the direction, its buffer, two gradients."""
_IN_A_SEARCH: Final = 9
"""Number of vectors in addition to the pairs in a line search: also its start, and up to four gradients along the
line.
"""


def list_tensors(optimizer: torch.optim.LBFGS) -> list[Tensor]:
    """Return the tensors in L-BFGS's state, and in local variables of its update in progress, except parameters."""
    pending: list[object] = [*optimizer.state.values(), *_variables()]
    tensors: list[Tensor] = []
    while pending:
        obj = pending.pop()
        if isinstance(obj, Tensor):
            tensors += () if isinstance(obj, torch.nn.Parameter) else (obj,)
        elif isinstance(obj, (dict, list, tuple)):
            pending += obj.values() if isinstance(obj, dict) else obj
    return tensors


def predict_missing_history_bytes(optimizer: torch.optim.LBFGS) -> int:
    """Return the bytes that L-BFGS will need beyond those it holds now: for a full history, and for the vectors that it
    holds while it evaluates the model.
    """
    (group,) = optimizer.param_groups
    numbers: list[Tensor] = [p for p in group["params"] if not p.is_meta]
    n_numbers = sum(p.numel() * (1 + p.is_complex()) for p in numbers)
    itemsize = max((p.element_size() // (1 + p.is_complex()) for p in numbers), default=0)
    n_pairs: int = group["history_size"]
    n_vectors = 2 * n_pairs + (_IN_A_SEARCH if group["line_search_fn"] else _IN_AN_EVALUATION)
    most = (n_vectors * n_numbers + 2 * n_pairs) * itemsize
    own = {t.untyped_storage().data_ptr(): t.nbytes for t in list_tensors(optimizer)}
    return max(0, most - sum(own.values()))


def predict_coming_history(optimizers: Iterable[Optimizer]) -> tuple[int, str]:
    """Return the bytes that the L-BFGS optimizers among these will need beyond those they hold, and a note on them."""
    growing = [o for o in optimizers if isinstance(o, torch.optim.LBFGS)]
    coming_bytes = sum(map(predict_missing_history_bytes, growing))
    n_pairs = max((o.param_groups[0]["history_size"] for o in growing), default=0)
    what = (
        f"L-BFGS is counted with its full history of {n_pairs} pairs, {format_bytes(coming_bytes)} more than it holds"
    )
    return coming_bytes, f"{what}: a run that ends before needs less. Set history_size to the iterations of the run"


def _variables() -> Iterator[object]:
    """Yield the values of local variables of L-BFGS updates in progress, except those of the user's closure."""
    for frame in walk_frames(sys._getframe(1)):
        if module_name(frame) == torch.optim.LBFGS.__module__:
            with local_variables(frame) as variables:
                values = [*variables.values()]
            yield from values
