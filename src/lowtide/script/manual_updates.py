"""Models updated without an optimizer of torch, whose steps have no visible end."""

from __future__ import annotations

from torch import nn

from lowtide._torch.fake_modes import is_fake
from lowtide._torch.tensors import parts_of
from lowtide.errors import RehearsalError
from lowtide.script.composite_model import name_of

MOST = 6
"""Number of parameter changes without an optimizer of torch after which an error is raised."""


def has_others(model: nn.Module) -> bool:
    """Return True if other tensors replace the model's parameters, as within `torch.func.functional_call`."""
    return not all(isinstance(p, nn.Parameter) for p in model.parameters())


class ManualUpdates:
    """Counts of parameter changes from one call of the model to the next, while no optimizer stepped."""

    def __init__(self) -> None:
        self.n_updates = 0
        self._ends: list[str] = []
        """Last element of each parameter, as text, at the model's last call."""

    def called(self, model: nn.Module) -> None:
        """Compare parameters at a call of the model while no optimizer has stepped.

        Raises RehearsalError after MOST changes.
        """
        if has_others(model):
            return
        trained = [p.detach() for p in model.parameters() if p.requires_grad and not is_fake(p)]
        parts = (part for whole in trained for part in parts_of(whole) if part.numel() and not part.is_meta)
        ends = [str(part[(-1,) * part.dim()].item()) for part in parts]
        self.n_updates += bool(self._ends and ends) and ends != self._ends
        self._ends = ends
        if self.n_updates == MOST:
            raise RehearsalError(
                f"the parameters of {name_of(model)} changed {MOST} times, and no torch.optim.Optimizer "
                "stepped: something else updates them, so where a step ends is not known.\n"
                "  Derive what updates them from torch.optim.Optimizer, or call lowtide.fit(model, step, batch) in the "
                "script."
            )
