"""The training loop, and digests that reveal any bit that differs between two runs of it."""

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
    """Record of a run: for each step the loss, a digest of all gradients and the time; and digests of the final state.

    `state` has one digest each for the parameters, the buffers, the optimizer and torch's random numbers.
    """

    losses: tuple[float, ...]
    gradients: tuple[str, ...]
    step_ms: tuple[float, ...]
    state: Mapping[str, str]

    @property
    def fastest_ms(self) -> float:
        """Time of the fastest step, the one that other load on the machine disturbed least."""
        return min(self.step_ms)

    def differences(self, other: "Training") -> tuple[str, ...]:
        """Describe the bits that differ between two runs, one line each; times are ignored.

        Empty if losses, gradients and state are equal.
        """
        differences = []
        if len(self.losses) != len(other.losses):
            differences.append(f"{len(self.losses)} steps, not {len(other.losses)}")
        runs = zip(self.losses, other.losses, self.gradients, other.gradients, strict=False)
        for step, (loss, other_loss, gradients, other_gradients) in enumerate(runs, start=1):
            if loss.hex() != other_loss.hex():  # as text, so that a NaN equals itself
                differences.append(f"step {step}: loss {loss}, not {other_loss}")
            if gradients != other_gradients:
                differences.append(f"step {step}: gradients")
        differences += [
            f"after the last step: {what}" for what in self.state if self.state[what] != other.state.get(what)
        ]
        return tuple(differences)


class Loop:
    """Training loop over a workload, run a step at a time from the initial state. Several loops can take turns in one
    process.

    A plan or checkpointing switch on the model stays in force. Each loop continues with the random numbers of its own
    last step. Gradients are digested between backward and update, on the CPU without allocating tensors; steps' times
    exclude this. Batches repeat after the last.
    """

    def __init__(self, work: Workload) -> None:
        work.reset()
        self.work = work
        self._random = RandomState.now()
        self._losses: list[float] = []
        self._gradients: list[str] = []
        self._step_ms: list[float] = []
        self._off_clock_ms = 0.0  # of the current step

    def step(self) -> float:
        """Run one step; return its loss."""
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
        """The next step's batch."""
        return self.work.batches[len(self._losses) % len(self.work.batches)]

    def result(self) -> Training:
        """Return a record of the steps so far."""
        self._random.restore()
        return Training(
            losses=tuple(self._losses),
            gradients=tuple(self._gradients),
            step_ms=tuple(self._step_ms),
            state=compute_state_digests(self.work),
        )

    def _digest_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        started = now_ms()
        named = self.work.model.named_parameters()
        self._gradients.append(digest((name, p.grad) for name, p in named if p.grad is not None))
        self._off_clock_ms = now_ms() - started


def train(work: Workload, steps: int, *, on_step: Callable[[int, float], None] | None = None) -> Training:
    """Train `work` from its initial state for `steps` steps; call `on_step(steps done, loss)` after each."""
    loop = Loop(work)
    for done in range(1, steps + 1):
        loss = loop.step()
        if on_step is not None:
            on_step(done, loss)
    return loop.result()


def compute_state_digests(work: Workload) -> dict[str, str]:
    """Return one digest each of parameters, buffers, optimizer state and the states of torch's generators."""
    moments = work.optimizer.state_dict()["state"]
    generators = [("cpu", torch.get_rng_state())]
    if (device := next(work.model.parameters()).device).type == "cuda":
        generators.append(("cuda", torch.cuda.get_rng_state(device)))
    return {
        "parameters": digest(work.model.named_parameters()),
        "buffers": digest(work.model.named_buffers()),
        "optimizer": digest((f"{i}.{key}", value) for i in moments for key, value in moments[i].items()),
        "random numbers": digest(generators),
    }


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes of tensors, in hexadecimal.

    Equal digests mean equality bit by bit.
    """
    sha = hashlib.sha256()
    for name, tensor in named:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return sha.hexdigest()
