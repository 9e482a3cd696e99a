"""Outcome of a step: out of memory or not, and the bits of its results."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.compiled_code import never_compiled
from lowtide._torch.optim import list_parameters
from lowtide._torch.patching import this_thread_only
from lowtide._torch.tensors import find_parts
from lowtide.memory.entry_storages import exclude_from_entry
from lowtide.runtime.batch_tensors import collect_tensors
from lowtide.state.step_snapshot import RandomState

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowtide.errors import LowtideError

T = TypeVar("T")

_PHRASES = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception reports exhausted memory: of CUDA or a similar device, the CPU allocator, cuBLAS,
    cuDNN.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)


def unless_out_of_memory(run: Callable[[], T], refuse: Callable[[str], LowtideError]) -> T:
    """Return the result of `run`; if memory runs out, raise the error that `refuse` builds from the message's first
    line.
    """
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).partition("\n")[0]
    raise refuse(message)  # outside `except`, where the frames of the failed step and their tensors are freed


REPEATED = 5
"""Largest number of times that a step is repeated to check if a difference also occurs between repetitions. Some CUDA
kernels add up in another order only now and then.
"""

FIRST_UPDATE = " (0)"
"""End of a gradient's name: the number of updates in the step before it was used."""

_FOLLOWING_LOSS = ("gradients", "parameters", "buffers", "optimizer state", "counters")
"""Kinds of result computed from a loss."""

_PIECE = 1 << 22
"""Number of elements digested at a time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Digests of everything that a step leaves behind, by kind and name. Equal digests mean equal bits."""

    digests: dict[str, dict[str, str]]
    copies: dict[str, dict[str, Tensor]]
    """Copies of loss, gradients and parameters in host memory, if requested."""
    arrived: dict[str, str]
    """Digests of the gradients that backward produced, before anything else changed them, such as clipping."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        step: Callable[[Any], Any],
        batch: Any,
        *,
        copies: bool = False,
        counts: Callable[[], dict[str, str]] = dict,
    ) -> Outcome:
        """Run the step and digest its results.

        Gradients are digested just before the optimizer uses them; without an optimizer, at the end of the step. If
        there are none at the end either, the gradients that backward produced are digested. `counts` is called after
        the step, and returns changed numbers and strings.
        """
        gradients: dict[str, str] = {}
        arrived: dict[str, str] = {}
        optimizers: list[Optimizer] = []
        copied: dict[str, dict[str, Tensor]] = {"loss": {}, "gradients": {}, "parameters": {}} if copies else {}

        def copy(kind: str, name: str, tensor: Tensor) -> None:
            for number, part in enumerate(_parts(tensor)) if copies else ():
                copied[kind][f"{name}, {number}"] = exclude_from_entry(part.detach().to("cpu", copy=True))

        def digest_gradients(number: int) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients[f"{name} ({number})"] = digest(parameter.grad)
                    copy("gradients", f"{name} ({number})", parameter.grad)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            digest_gradients(len(optimizers))
            optimizers.append(optimizer)

        @never_compiled  # backward may be called in compiled code
        def digest_arrived(name: str, parameter: Tensor) -> None:
            if parameter.grad is not None:  # a lever may have freed the gradient
                arrived[f"{name}{FIRST_UPDATE}"] = digest(parameter.grad)

        with contextlib.ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(this_thread_only(before_step)).remove)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(partial(digest_arrived, name))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            result = step(batch)
        digest_gradients(len(optimizers))
        random_numbers = _digest_random_numbers()
        for number, tensor in enumerate(collect_tensors(result)):
            copy("loss", str(number), tensor)
        for name, parameter in model.named_parameters():
            copy("parameters", name, parameter)
        digests = {
            "loss": {str(i): digest(t) for i, t in enumerate(collect_tensors(result))},
            "gradients": gradients or arrived,
            **_digest_state(model, optimizers),
            "counters": counts(),
            "random numbers": random_numbers,
        }
        return cls(digests, copied, arrived)

    def made(self, before: Outcome) -> set[str]:
        """Return the kinds of result that are new or changed since `before`."""
        return {kind for kind, names in before.differences(self).items() if any(n in self.digests[kind] for n in names)}

    def differences(self, other: Outcome) -> dict[str, tuple[str, ...]]:
        """Return, for each kind of result, the names whose digests differ in `other`."""
        differing = {}
        for kind, digests in self.digests.items():
            others = other.digests[kind]
            differing[kind] = tuple(
                sorted(n for n in digests.keys() | others.keys() if digests.get(n) != others.get(n))
            )
        return differing

    def following(self, varying: dict[str, set[str]]) -> dict[str, set[str]]:
        """Return the names of results, by kind, that are computed from the results in `varying`.

        Such results vary too, even if two runs agree, because rounding may hide a change.
        """
        all_of = {kind: set(names) for kind, names in self.digests.items()}
        if varying.get("loss"):
            return {kind: all_of[kind] for kind in _FOLLOWING_LOSS}
        if not varying.get("gradients"):
            return {}
        # after clipping, for example, each gradient is computed from all of them; so is each one after the first update
        bits = self.digests["gradients"]
        is_changed = any(bits.get(name) != digest for name, digest in self.arrived.items())
        first = {name.rpartition(" (")[0]: bits[name] for name in bits if name.endswith(FIRST_UPDATE)}
        later = {name for name in bits if bits[name] != first.get(name.rpartition(" (")[0])}
        gradients = {*varying["gradients"], *(bits if is_changed else later)}
        parameters = {name.rpartition(" (")[0] for name in gradients}
        return {"gradients": gradients, "parameters": parameters, "optimizer state": all_of["optimizer state"]}

    def relative_differences(self, other: Outcome) -> dict[str, float]:
        """Return the relative distance of `other` from this outcome, for each kind of result that both outcomes hold
        copies of.

        The distance is |other - this| / |this| in the Euclidean norm, with all tensors of a kind taken as one long
        vector.
        """
        distances = {}
        for kind, tensors in self.copies.items():
            others = other.copies.get(kind, {})
            if tensors and tensors.keys() == others.keys():
                squared_distance = sum(
                    float((others[name].double() - tensors[name].double()).square().sum()) for name in tensors
                )
                norm = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
                distances[kind] = (
                    0.0 if squared_distance == 0 else math.sqrt(squared_distance / norm) if norm else math.inf
                )
        return distances


def find_varying_results(
    outcome: Outcome, differences: Mapping[str, tuple[str, ...]], once_more: Callable[[], Outcome | None]
) -> dict[str, tuple[str, ...]]:
    """Return the `differences` that can't be compared, because repetitions of one step differ in these results as well.

    A kernel that adds numbers in any order, for example, gives results that vary. Results computed from such results
    can't be compared either.

    Args:
        outcome: The outcome of the step.
        differences: Names of results that differ from another step's, by kind. No more repetitions are run once all of
            them are known to vary.
        once_more: Function that repeats the step; it returns None if there is not enough memory.
    """
    varying: dict[str, set[str]] = {kind: set() for kind in outcome.digests}
    for _ in range(REPEATED):
        if not without(differences, varying) or (again := once_more()) is None:
            break
        for kind, names in outcome.differences(again).items():
            varying[kind].update(names)
        for kind, following in outcome.following(varying).items():
            varying[kind] |= following
    return without(differences, without(differences, varying))


def without(
    differences: Mapping[str, tuple[str, ...]], varying: Mapping[str, Collection[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the names in `differences` that are not in `varying`, by kind."""
    rest = {kind: tuple(n for n in names if n not in varying.get(kind, ())) for kind, names in differences.items()}
    return {kind: names for kind, names in rest.items() if names}


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and bits; for a distributed tensor, of its local part."""
    content = hashlib.blake2b(digest_size=16)
    for dense in map(torch.Tensor.detach, _parts(tensor)):
        if dense.layout is not torch.strided:
            dense = dense.cpu().to_dense()
        if not dense.is_contiguous():
            dense = dense.cpu()  # `flatten` would copy it on its device, which may have no room
        content.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        for piece in torch.split(dense.flatten(), _PIECE):
            # A copy: a storage that NumPy has seen can't be distinguished from a borrowed one.
            content.update(piece.contiguous().view(torch.uint8).cpu().clone().numpy().data)
    return content.hexdigest()


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """Return the inner tensors of a wrapper, such as the local part of a distributed tensor; else the tensor itself."""
    return find_parts(tensor) if hasattr(tensor, "__tensor_flatten__") else (tensor,)


def _digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _digest_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, dict[str, str]]:
    """Return digests of the model's parameters and buffers, and of the state of the optimizers."""
    unique = {id(optimizer): optimizer for optimizer in optimizers}.values()
    parameters = [(o, p) for o in unique for p in list_parameters(o)]
    state = [t for o, p in parameters if p in o.state for t in collect_tensors(o.state[p])]
    return {
        "parameters": {name: digest(p) for name, p in model.named_parameters()},
        "buffers": {name: digest(b) for name, b in model.named_buffers()},
        "optimizer state": {str(i): digest(t) for i, t in enumerate(state)},
    }


def _digest_random_numbers() -> dict[str, str]:
    """Return digests of the states of all random number generators."""
    random = RandomState.now()
    return {
        "cpu": digest(random.torch_cpu),
        **{f"GPU {gpu}": digest(state) for gpu, state in random.torch_gpus.items()},
        "python": _digest_text(repr(random.python)),
        "numpy": _digest_text(repr(random.numpy)),
    }
