"""The training loop, and digests that say whether two runs of it were the same bit by bit."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide._torch.device_timing import now_ms
from lowtide.cli.demo.text_batches import Batch
from lowtide.cli.demo.workloads import Workload
from lowtide.state.step_snapshot import RandomState


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run of the loop: the loss, a digest of all gradients and the time of each step, and digests of what is left.

    `state` has one digest each for the parameters, the buffers, the optimizer and torch's random numbers.
    """

    losses: tuple[float, ...]
    gradients: tuple[str, ...]
    step_ms: tuple[float, ...]
    state: Mapping[str, str]

    @property
    def fastest_ms(self) -> float:
        """The fastest step's time: of all steps the one that other load on the machine disturbed least."""
        return min(self.step_ms)

    def differences(self, other: "Training") -> tuple[str, ...]:
        """Where two runs differ in any bit, one line each; times aside. Empty: losses, gradients, state are equal."""
        found = []
        if len(self.losses) != len(other.losses):
            found.append(f"{len(self.losses)} steps, not {len(other.losses)}")
        runs = zip(self.losses, other.losses, self.gradients, other.gradients, strict=False)
        for step, (loss, other_loss, gradients, other_gradients) in enumerate(runs, start=1):
            if loss.hex() != other_loss.hex():  # as text, so that a NaN equals itself
                found.append(f"step {step}: loss {loss}, not {other_loss}")
            if gradients != other_gradients:
                found.append(f"step {step}: gradients")
        found += [f"after the last step: {what}" for what in self.state if self.state[what] != other.state.get(what)]
        return tuple(found)


class Loop:
    """The loop over a workload, from its first bit and a step at a time. Several can take turns in one process.

    It is the plain loop: what a plan or a checkpointing switch does to the model is in force in it. Each loop goes on
    with the random numbers that its last step left. Gradients are digested between backward and update, off the clock,
    on the CPU without allocating tensors. Batches that are used up start over.
    """

    def __init__(self, work: Workload) -> None:
        work.reset()
        self.work = work
        self._random = RandomState.now()
        self._losses: list[float] = []
        self._gradients: list[str] = []
        self._step_ms: list[float] = []
        self._off_clock_ms = 0.0  # of the step under way

    def step(self) -> float:
        """One step; its loss."""
        work = self.work
        self._random.restore()
        hook = work.optimizer.register_step_pre_hook(self._digest_gradients)
        try:
            started = now_ms()
            loss = work.step(self.batch)
            self._step_ms.append(now_ms() - started - self._off_clock_ms)
        finally:
            hook.remove()
            self._random = RandomState.now()
        self._losses.append(float(loss))
        return self._losses[-1]

    @property
    def batch(self) -> Batch:
        """The next step's."""
        return self.work.batches[len(self._losses) % len(self.work.batches)]

    def result(self) -> Training:
        """The steps so far."""
        self._random.restore()
        return Training(
            losses=tuple(self._losses),
            gradients=tuple(self._gradients),
            step_ms=tuple(self._step_ms),
            state=state_digests(self.work),
        )

    def _digest_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        started = now_ms()
        named = self.work.model.named_parameters()
        self._gradients.append(digest((name, p.grad) for name, p in named if p.grad is not None))
        self._off_clock_ms = now_ms() - started


def train(work: Workload, steps: int, *, on_step: Callable[[int, float], None] | None = None) -> Training:
    """Train `work` from its first bit for `steps` steps; after each, `on_step(steps done, loss)` is called."""
    loop = Loop(work)
    for done in range(1, steps + 1):
        loss = loop.step()
        if on_step is not None:
            on_step(done, loss)
    return loop.result()


def state_digests(work: Workload) -> dict[str, str]:
    """One digest each of the parameters, the buffers, the optimizer's state and the states of torch's generators."""
    moments = work.optimizer.state_dict()["state"]
    generators = [("cpu", torch.get_rng_state())]
    if (device := _device(work)).type == "cuda":
        generators.append(("cuda", torch.cuda.get_rng_state(device)))
    return {
        "parameters": digest(work.model.named_parameters()),
        "buffers": digest(work.model.named_buffers()),
        "optimizer": digest((f"{i}.{key}", value) for i in moments for key, value in moments[i].items()),
        "random numbers": digest(generators),
    }


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of tensors, in hexadecimal. Equal digests: equal bit by bit."""
    sha = hashlib.sha256()
    for name, tensor in named:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _device(work: Workload) -> torch.device:
    return next(work.model.parameters()).device
