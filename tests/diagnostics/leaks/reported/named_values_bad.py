"""Transitions of a run are kept as named tuples with values that have a graph."""

from typing import NamedTuple

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()


class Transition(NamedTuple):
    step: int
    value: torch.Tensor


memory = []
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 64, (256,))
    values = model(x)
    memory.append(Transition(step, values))
    loss = criterion(values, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT021")
print("holder", "memory' [8 entries].value")
print("bytes", 524288)
print("fix", "store less in `memory[..].value`")
