"""`workload("gpt2")`: model, data and optimizer as one training step that can be reset to its initial bits."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.cli.demo.models import BUILDERS, Size
from lowtide.cli.demo.text_batches import Batch
from lowtide.memory.entry_storages import exclude_from_entry

MODELS = tuple(BUILDERS)
"""The names of workloads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A training loop in parts: `for batch in work.batches: work.step(batch)`.

    The model is in training mode, all batches have one shape and own their storage, and no state exists yet in the
    optimizer. `items_per_step` counts `items` ("tokens" or "images").
    """

    name: str
    description: str
    model: nn.Module = field(repr=False)
    batches: tuple[Batch, ...] = field(repr=False)
    loss: Callable[[nn.Module, Batch], Tensor] = field(repr=False)
    optimizer: torch.optim.Optimizer = field(repr=False)
    items: str
    items_per_step: int
    seed: int
    _first: dict[str, Tensor] = field(init=False, repr=False)
    _first_optimizer: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        first = {name: exclude_from_entry(tensor.detach().cpu().clone()) for name, tensor in self.tensors().items()}
        object.__setattr__(self, "_first", first)
        object.__setattr__(self, "_first_optimizer", copy.deepcopy(self.optimizer.state_dict()))

    def tensors(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers by name, including the buffers that its `state_dict` leaves out."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def step(self, batch: Batch) -> Tensor:
        """Run one plain step: forward, backward, update, gradients dropped. Returns the loss, detached."""
        loss = self.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def reset(self) -> None:
        """Reset everything, bit by bit: parameters and buffers (in place), gradients, optimizer, random numbers."""
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(self._first[name])
        for parameter in self.model.parameters():
            parameter.grad = None
        self.optimizer.load_state_dict(copy.deepcopy(self._first_optimizer))
        self.model.train()
        torch.manual_seed(self.seed)

    def exclude_from_entry(self) -> None:
        """Leave this workload's memory out of recordings of another workload."""
        parameters = [*self.model.parameters()]
        state = (value for entry in self.optimizer.state.values() for value in entry.values())
        gradients = (parameter.grad for parameter in parameters)
        for tensor in (*parameters, *self.model.buffers(), *gradients, *state):
            if isinstance(tensor, Tensor):
                exclude_from_entry(tensor)

    @property
    def checkpoint_refused(self) -> str | None:
        """The reason why `checkpoint_every_block` can't be used on this model; None if it can."""
        model = self._find_transformers_model()
        if getattr(model, "supports_gradient_checkpointing", False):
            return None
        return f"transformers does not support checkpointing for {type(model).__name__}"

    def _find_transformers_model(self) -> nn.Module:
        """Return the outermost module of a transformers class, which has its switches; `model` may wrap it."""
        return next(m for m in self.model.modules() if hasattr(m, "supports_gradient_checkpointing"))

    @contextmanager
    def checkpoint_every_block(self) -> Iterator[None]:
        """Checkpoint every block within a `with` statement, non-reentrantly, by transformers' own switch.

        Turning the switch off leaves attributes on the modules and a hook on the embedding; these are removed here,
        too. Raises ValueError if `checkpoint_refused`.
        """
        if self.checkpoint_refused is not None:
            raise ValueError(self.checkpoint_refused)
        model: Any = self._find_transformers_model()
        before = [
            (attributes, {name: attributes[name] for name in _SWITCHED if name in attributes})
            for attributes in (module.__dict__ for module in model.modules())
        ]
        # transformers 5.23 renames the switch; version 6 drops the old name.
        switch_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        try:
            switch_on({"use_reentrant": False})
            yield
        finally:
            model.disable_input_require_grads()
            for attributes, values in before:
                for name in _SWITCHED:
                    attributes.pop(name, None)
                attributes.update(values)


# Attributes that the switch sets on the model and its blocks.
_SWITCHED = (
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
)


def workload(
    name: str,
    *,
    batch_size: int | None = None,
    length: int | None = None,
    layers: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Workload:
    """Build one of MODELS: "gpt2", "bert", "llama" or "resnet". Two builds with equal arguments are equal bit by bit.

    The sizes are those of the demo unless given: rows per batch, tokens per row (or pixels per side), and layers
    (ResNet: per stage). torch's generators are restored. Raises PackageMissing without the packages
    of `lowtide[demo]`.
    """
    if name not in BUILDERS:
        raise ValueError(f"there is no workload {name!r}: take one of {', '.join(MODELS)}")
    build, usual = BUILDERS[name]
    size = Size(
        batch_size=usual.batch_size if batch_size is None else batch_size,
        length=usual.length if length is None else length,
        layers=usual.layers if layers is None else layers,
    )
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        parts = build(size)
    finally:
        torch.default_generator.set_state(before)
    model = parts.model.to(device).train()
    return Workload(
        name=name,
        description=parts.description,
        model=model,
        batches=tuple({key: value.to(device) for key, value in batch.items()} for batch in parts.batches),
        loss=parts.loss,
        optimizer=parts.optimizer(model.parameters()),
        items=parts.items,
        items_per_step=parts.items_per_step,
        seed=seed,
    )
