"""A replay buffer of bounded length."""

from collections import deque

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

buffer = deque(maxlen=4)
for number in range(12):
    optimizer.zero_grad()
    values = model(torch.randn(ROWS, WIDTH))
    loss = values.square().mean()
    loss.backward()
    optimizer.step()
    buffer.append((number, values.detach()))
    del values
