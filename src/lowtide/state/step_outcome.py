"""How a step ended: out of memory or not, and with which bits."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide._torch.patching import this_thread_only
from lowtide._torch.tensors import parts_of
from lowtide.memory.entry_storages import set_aside
from lowtide.runtime.fingerprint import tensors_in
from lowtide.state.step_snapshot import RandomState

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lowtide.errors import LowtideError

T = TypeVar("T")

_PHRASES = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: CUDA and its kin, the CPU allocator, cuBLAS and cuDNN."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _PHRASES)


def unless_out_of_memory(run: Callable[[], T], refuse: Callable[[str], LowtideError]) -> T:
    """What `run` gives; if memory runs out in it, the error that `refuse` makes of the first line of what was said."""
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
    raise refuse(said)  # outside of `except`: the failed step's frames, and all they hold, are gone by now


_PIECE = 1 << 22
"""Elements that are digested at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Digests of everything that a step leaves behind, by kind and name. Equal digests mean equal bits."""

    digests: dict[str, dict[str, str]]
    copies: dict[str, dict[str, Tensor]]
    """Where asked for, loss, gradients and parameters themselves, in host memory."""

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
        """Run the step. Gradients are those that the optimizer was about to use; without one, those at the end.

        Where there are none by then, they are those that backward gave. `counts` are asked for afterwards.
        """
        gradients: dict[str, str] = {}
        came: dict[str, str] = {}
        optimizers: list[Optimizer] = []
        copied: dict[str, dict[str, Tensor]] = {"loss": {}, "gradients": {}, "parameters": {}} if copies else {}

        def copy(kind: str, name: str, tensor: Tensor) -> None:
            for number, part in enumerate(_parts(tensor)) if copies else ():
                copied[kind][f"{name}, {number}"] = set_aside(part.detach().to("cpu", copy=True))

        def look(number: int) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients[f"{name} ({number})"] = digest(parameter.grad)
                    copy("gradients", f"{name} ({number})", parameter.grad)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            look(len(optimizers))
            optimizers.append(optimizer)

        def comes(name: str, parameter: Tensor) -> None:
            if parameter.grad is not None:  # a lever may have let go of it by now
                came[f"{name} (0)"] = digest(parameter.grad)

        with contextlib.ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(this_thread_only(before_step)).remove)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(partial(comes, name))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            result = step(batch)
        look(len(optimizers))
        unique = {id(optimizer): optimizer for optimizer in optimizers}.values()
        parameters = [(o, p) for o in unique for group in o.param_groups for p in group["params"]]
        state = [t for o, p in parameters if p in o.state for t in tensors_in(o.state[p])]
        random = RandomState.now()
        for number, tensor in enumerate(tensors_in(result)):
            copy("loss", str(number), tensor)
        for name, parameter in model.named_parameters():
            copy("parameters", name, parameter)
        return cls(
            {
                "loss": {str(i): digest(t) for i, t in enumerate(tensors_in(result))},
                "gradients": gradients or came,
                "parameters": {name: digest(p) for name, p in model.named_parameters()},
                "buffers": {name: digest(b) for name, b in model.named_buffers()},
                "optimizer state": {str(i): digest(t) for i, t in enumerate(state)},
                "counters": counts(),
                "random numbers": {
                    "cpu": digest(random.torch_cpu),
                    **{f"GPU {gpu}": digest(state) for gpu, state in random.torch_gpus.items()},
                    "python": _text_digest(repr(random.python)),
                    "numpy": _text_digest(repr(random.numpy)),
                },
            },
            copied,
        )

    def made(self, before: Outcome) -> set[str]:
        """The kinds in which the step has left something that was not there `before`, or was another."""
        return {kind for kind, names in before.differences(self).items() if any(n in self.digests[kind] for n in names)}

    def differences(self, other: Outcome) -> dict[str, tuple[str, ...]]:
        """For each kind the names whose bits are not the same in `other`; empty where all are."""
        found = {}
        for kind, mine in self.digests.items():
            theirs = other.digests[kind]
            found[kind] = tuple(sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n)))
        return found

    def relative_differences(self, other: Outcome) -> dict[str, float]:
        """How far `other` is from this one, for each kind that both have copies of: |other - this| / |this|.

        All tensors of a kind are taken as one long vector; the norm is the Euclidean one.
        """
        found = {}
        for kind, mine in self.copies.items():
            theirs = other.copies.get(kind, {})
            if mine and mine.keys() == theirs.keys():
                apart = sum(float((theirs[name].double() - mine[name].double()).square().sum()) for name in mine)
                norm = sum(float(tensor.double().square().sum()) for tensor in mine.values())
                found[kind] = 0.0 if apart == 0 else math.sqrt(apart / norm) if norm else math.inf
        return found


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's dtype, shape and bits; of one that is distributed, of the part that is here."""
    content = hashlib.blake2b(digest_size=16)
    for dense in map(torch.Tensor.detach, _parts(tensor)):
        if dense.layout is not torch.strided:
            dense = dense.cpu().to_dense()
        if not dense.is_contiguous():
            dense = dense.cpu()  # `flatten` would copy it where it is, and a device may have no room for that
        content.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        for piece in torch.split(dense.flatten(), _PIECE):
            # A copy: a storage that NumPy has seen can't be told from a borrowed one.
            content.update(piece.contiguous().view(torch.uint8).cpu().clone().numpy().data)
    return content.hexdigest()


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """What a wrapper has inside, as a distributed tensor has its local part; else the tensor itself."""
    return parts_of(tensor) if hasattr(tensor, "__tensor_flatten__") else (tensor,)


def _text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
