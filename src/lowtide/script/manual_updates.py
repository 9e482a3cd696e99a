"""Updates of a model without an optimizer of torch, such as `p.data.add_(p.grad, alpha=-lr)`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.tensors import find_parts
from lowtide.errors import RehearsalError
from lowtide.runtime.composite_model import find_name
from lowtide.script.alternating_models import collect_held_ids
from lowtide.script.calling_code import find_caller_optimizers

MOST = 6
"""Number of parameter changes, while no optimizer of these parameters stepped, after which an error is raised."""


def has_others(model: nn.Module) -> bool:
    """Return True if other tensors replace the model's parameters, as within `torch.func.functional_call`."""
    return not all(isinstance(p, nn.Parameter) for p in model.parameters())


class ManualUpdates:
    """Changes of parameters from one call of a model to the next, while no optimizer stepped.

    An update by hand is visible at the next call only, so a step lasts until then.
    """

    def __init__(self) -> None:
        self.n_updates = 0
        self.moved: frozenset[int] = frozenset()
        """Ids of the parameters that the last update changed."""
        self._ends: dict[int, str] = {}
        """Last element of each parameter, as text, at the first call since the last update, by id."""

    def called(self, model: nn.Module) -> None:
        """Remember an element of each parameter of `model`, which is about to be called."""
        if not has_others(model):
            self._ends = _read_last_elements(model) | self._ends

    def returned(self, model: nn.Module) -> None:
        """Accept changes of parameters by the call of `model` itself, such as in layers that are initialized from a
        batch.
        """
        if not has_others(model):
            self._ends |= _read_last_elements(model)

    def detect_update(self, models: Iterable[nn.Module]) -> bool:
        """Count an update if parameters changed since the last one; return True if the program holds no optimizer of
        them.

        Raises RehearsalError after MOST changes of parameters that an optimizer does hold.
        """
        called = list(models)
        if any(map(has_others, called)):
            return False
        ends = {key: end for model in called for key, end in _read_last_elements(model).items()}
        moved = frozenset(key for key, end in ends.items() if self._ends.get(key, end) != end)
        if not moved:
            return False
        self._ends.clear()
        self.n_updates += 1
        if not any(collect_held_ids(optimizer) & moved for optimizer in find_caller_optimizers()):
            self.moved = moved
            return True
        self._ends = ends
        if self.n_updates >= MOST:
            raise RehearsalError(
                f"the parameters of {find_name(called[0])} changed {MOST} times, and their torch.optim.Optimizer did "
                "not step: something else updates them, so where a step ends is not known.\n"
                "  Update them by that optimizer's step(), or call lowtide.fit(model, step, batch) in the script."
            )
        return False


def _read_last_elements(model: nn.Module) -> dict[int, str]:
    """Return the last element of each trained parameter, as text, by the parameter's id."""
    trained = [p for p in model.parameters() if p.requires_grad and not is_fake(p)]
    return {id(p): " ".join(str(_last(part)) for part in find_parts(p.detach()) if _is_readable(part)) for p in trained}


def _is_readable(part: torch.Tensor) -> bool:
    return bool(part.numel()) and not part.is_meta


def _last(part: torch.Tensor) -> float:
    return part[(-1,) * part.dim()].item()
