"""A look at whether a plan in force still holds: not for larger batches, and not where compiled code runs past it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.identity import in_words
from lowtide.remat.arguments import tensors_in_call
from lowtide.remat.given import no_larger, shapes_in
from lowtide.remat.seam import Front

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from lowtide.planner.records import Plan
    from lowtide.remat.engine import Engine


def lookout(model: nn.Module, plan: Plan, say: Callable[[str], None]) -> Front:
    """Says once, and goes, when `model` is trained on more than it was in the rehearsal, or more of it is trained."""
    known = [shapes_in(words) for words in plan.given]
    parameters = tuple(model.parameters())
    n_trained = sum(p.requires_grad for p in parameters)

    def around(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if model.training and torch.is_grad_enabled():
            found = tensors_in_call(args, kwargs)
            shapes = tuple(tuple(tensor.shape) for tensor in found)
            if known and not any(no_larger(shapes, most) for most in known):
                outgrown(f"was given {in_words(found)}, and the plan is for {' and for '.join(plan.given)}")
            elif (n_now := sum(p.requires_grad for p in parameters)) > n_trained:
                outgrown(f"has {n_now} parameters that are trained, and the plan is for {n_trained}")
        return inner(*args, **kwargs)

    def outgrown(what: str) -> None:
        front.remove()
        say(
            f"{type(model).__name__} {what}: the peak may be above the budget. Plan for the largest batch (in a "
            "script, let it come first), and for all that is trained."
        )

    front = Front(model, around)
    return front


def passed_by(engine: Engine, say: Callable[[str], None]) -> RemovableHandle:
    """Says once if the model is trained, and its calls do not come by the seams of the plan, or not all of them do."""
    reference = weakref.ref(engine)  # optimizers of the whole process will hold what looks at it
    looks = True

    def updated(optimizer: Optimizer, *_: Any) -> None:
        nonlocal looks
        engine = reference()
        if engine is None or not looks:
            return
        trained = {id(p) for p in engine.model.parameters() if p.grad is not None}
        if any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
            looks = False
            lost = [str(seam) for seam in engine.displaced()]
            if not engine.reached or lost:
                say(
                    f"{lost[0] if engine.reached else type(engine.model).__name__} was trained past the plan that is "
                    "in force on it: compiled code (torch.compile) or a copy ran in its place, which decides by itself "
                    "what it keeps. The peak may be above the budget. Compiled code has a budget of its own: "
                    "torch._functorch.config.activation_memory_budget = 0.5."
                )

    return register_optimizer_step_post_hook(updated)
