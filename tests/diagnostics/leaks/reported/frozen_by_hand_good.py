"""Parameters that are updated without an optimizer, beside one."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for _ in range(6):
    loss = other(model(torch.randn(ROWS, WIDTH))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in other.parameters():
        parameter.data -= 0.01 * parameter.grad
        parameter.grad = None
