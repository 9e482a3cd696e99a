"""Descriptions of calls whose saved tensors a plan can't reach, each with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

IN_TRANSFORM: Final = (
    "inside a transform of torch.func (grad, vmap, jacrev, ...), where torch has no saved-tensor hooks: nothing can "
    "be planned there.\n"
    "  For the gradients of one loss call the model outside it, `torch.func.functional_call(model, parameters, x)`, "
    "and then loss.backward() or torch.autograd.grad: they are the same. For gradients of each row, vmap(..., "
    "chunk_size=...) needs less memory."
)

_ONE_PAIR: Final = "of several pairs of saved-tensor hooks only the innermost runs, and a plan does nothing there."
_OF_TORCH: Final = {
    "save_on_cpu": (
        f"inside torch.autograd.graph.save_on_cpu: {_ONE_PAIR}\n"
        "  Take that block out. A plan recomputes what pays; on a GPU, lowtide.fit(..., offload=True) offloads as well."
    ),
    "_checkpoint_hook": (
        f"inside torch.utils.checkpoint: {_ONE_PAIR}\n  Call it as it is: a plan recomputes what pays, and no more."
    ),
}


def describe_hooked_calls(pack: Callable[..., Any]) -> str:
    """Describe calls whose saved tensors go to `pack`, a pack hook that is not Lowtide's, and state a remedy."""
    name = getattr(pack, "__qualname__", type(pack).__qualname__)
    return _OF_TORCH.get(name.partition(".")[0]) or (
        f"inside saved-tensor hooks of the program's own ({name}): {_ONE_PAIR}\n"
        "  Call the model outside that block, and open it in the model for the part that it is meant for."
    )
