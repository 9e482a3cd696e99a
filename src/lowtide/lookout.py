"""A look at whether a plan in force still holds: not for larger batches, and not where compiled code runs past it."""

from __future__ import annotations

import weakref
from collections import Counter
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
        saving = "" if plan.larger is None else ", though larger batches get the most saving plan"
        say(
            f"{type(model).__name__} {what}: the peak may be above the budget{saving}. Plan for the largest batch (in "
            "a script, let it come first), and for all that is trained."
        )

    front = Front(model, around)
    return front


LOOKS = 6
"""Updates of a model by which it is seen how it is trained."""

UNSEEN = 3
"""Steps of one optimizer without a call that comes by, after which that is said."""


def passed_by(engine: Engine, say: Callable[[str], None]) -> RemovableHandle:
    """Says once if the model is trained, and its calls do not come by the seams of the plan, or not all of them do."""
    reference = weakref.ref(engine)  # optimizers of the whole process will hold what looks at it
    looks = LOOKS
    known: dict[int, int] = {}
    """By optimizer, the calls that had come by when it stepped last."""
    unseen: Counter[int] = Counter()
    """And its steps in a row before which none came by. A few may use gradients from before the plan."""

    def updated(optimizer: Optimizer, *_: Any) -> None:
        nonlocal looks
        engine, key = reference(), id(optimizer)
        if engine is None or not looks:
            return
        trained = {id(p) for p in engine.model.parameters() if p.grad is not None}
        if not any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
            return
        looks -= 1
        unseen[key] = unseen[key] + 1 if engine.n_runs == known.get(key, 0) else 0
        known[key] = engine.n_runs
        model, lost = type(engine.model).__name__, next(engine.displaced(), None)
        if lost is None and unseen[key] < UNSEEN:
            return
        looks = 0
        if lost is None and engine.n_runs_in_eval_mode:
            say(f"{model} is trained in eval mode, where a plan does nothing: call model.train() before.")
        else:
            say(
                f"{lost or model} is trained past the plan that is in force on it: compiled code (torch.compile) or a "
                "copy runs in its place, which decides by itself what it keeps. The peak may be above the budget. "
                "Compile blocks in their place before they are planned for (block.compile())."
            )

    return register_optimizer_step_post_hook(updated)
