"""Models that are not called as a whole: an encoder and a decoder, the two models of a GAN, a frozen model and a
prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from lowtide.planner.records import Fingerprint


class CompositeModel(nn.Module):
    """Modules that are trained together but not called as a whole, each under the name of its class.

    `alone` are trained parameters that no module owns and whose gradients pass through these modules. They may be plain
    tensors, such as an image that is optimized, which `register_parameter` would reject.
    """

    def __init__(self, modules: Iterable[nn.Module], alone: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alone = tuple(alone)
        self._parameters.update((f"alone{number}", parameter) for number, parameter in enumerate(self.alone))  # type: ignore[misc]
        count: Counter[str] = Counter()
        for module in modules:
            name = find_name(module)
            count[name] += 1
            self.add_module(name if count[name] == 1 else f"{name}{count[name]}", module)


def find_name(model: nn.Module) -> str:
    """Return the name of the model's class; for a `CompositeModel`, the names of its parts."""
    if type(model) is CompositeModel:
        *others, last = model._modules
        return f"{', '.join(others)} and {last}" if others else last
    # the attribute in which torch.compile puts the model that it wraps
    return type(getattr(model, "_orig_mod", model)).__name__


def is_of_parts(fingerprint: Fingerprint) -> bool:
    """Return True if the fingerprint is of a `CompositeModel`."""
    return fingerprint.model.startswith(f"{CompositeModel.__name__} ")


def join_models(modules: Sequence[nn.Module]) -> nn.Module:
    """Return one module that contains all `modules`: one of them if it contains all others, else a `CompositeModel`."""
    inside = {id(below) for module in modules for below in module.modules() if below is not module}
    outermost = [module for module in modules if id(module) not in inside]
    return outermost[0] if len(outermost) == 1 else CompositeModel(outermost)
