"""Training loops of the measured runs, with their steps in the order of xMem's artefact.

Tensors held by the loop's variables are part of a run's memory: `outputs` (logits, and keys and values of the cache)
lives until the next forward has returned, the batch until the next one is fetched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from estimators.rows import ITERATIONS, Row

SIDE = 86
"""Height and width of an image in pixels."""


class Loop:
    """Training loop of a run: each of two calls runs half of the `ITERATIONS`, on the model's device. The argument is
    unused.

    `lengths` has the tokens of the longest line in each iteration.
    """

    def __init__(self, row: Row, model: nn.Module, lengths: tuple[int, ...]) -> None:
        self.model = model
        self.optimizer = getattr(torch.optim, row.optimizer)(model.parameters(), lr=0.001)
        self._zero_grad_mode = row.zero_grad_mode or 0  # if not recorded, no old gradients are assumed
        self._batches = [_batch(row, model, length) for length in lengths]
        self._done = 0
        self.inputs: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.choice: Any = None

    def __call__(self, _: object) -> None:
        for _ in range(ITERATIONS // 2):
            batch = self._batches[self._done]
            self._done += 1
            self.inputs = None
            self._zero_grad(0)
            device = next(self.model.parameters()).device
            self.inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            self._forward()
            self._zero_grad(1)
            self.loss.backward()
            self.optimizer.step()
            if "images" in batch:
                self.choice = torch.max(self.outputs, 1)[1]
            self._zero_grad(2)

    def _forward(self) -> None:
        if "images" in self.inputs:
            self.outputs = self.model(self.inputs["images"])
            self.loss = nn.functional.cross_entropy(self.outputs, self.inputs["labels"])
        else:
            self.outputs = self.model(**self.inputs)
            self.loss = self.outputs.loss

    def _zero_grad(self, mode: int) -> None:
        if mode == self._zero_grad_mode:
            self.optimizer.zero_grad()


def _batch(row: Row, model: nn.Module, length: int) -> dict[str, torch.Tensor]:
    """Make a batch on the CPU. In a batch of lines, the first has `length` tokens and each other line half, padded."""
    if row.family == "cnn":
        images = torch.empty(row.batch, 3, SIDE, SIDE)
        return {"images": images, "labels": torch.zeros(row.batch, dtype=torch.int64)}
    ids = torch.randint(5, int(model.config.vocab_size), (row.batch, length))
    mask = torch.ones_like(ids)
    mask[1:, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
