"""The training loops of the measured runs, in the order in which the artefact of xMem takes its steps.

What its variables hold is part of a run's memory: `outputs` (logits, and keys and values of the cache) lives until the
next forward has returned, the batch until the next one is fetched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from estimators.rows import ITERATIONS, Row

SIDE = 86
"""Pixels of an image's side."""


class Loop:
    """`ITERATIONS` in two calls, on whatever device the model is. The argument is not used.

    `lengths` are the tokens of the longest line in each iteration.
    """

    def __init__(self, row: Row, model: nn.Module, lengths: tuple[int, ...]) -> None:
        self.model = model
        self.optimizer = getattr(torch.optim, row.optimizer)(model.parameters(), lr=0.001)
        self._zero_grad_mode = row.zero_grad_mode or 0  # where it is not recorded no old gradients are seen
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
    """On the CPU. Of a batch of lines, the first is `length` tokens and the others, padded, are half of that."""
    if row.family == "cnn":
        images = torch.empty(row.batch, 3, SIDE, SIDE)
        return {"images": images, "labels": torch.zeros(row.batch, dtype=torch.int64)}
    ids = torch.randint(5, int(model.config.vocab_size), (row.batch, length))
    mask = torch.ones_like(ids)
    mask[1:, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
