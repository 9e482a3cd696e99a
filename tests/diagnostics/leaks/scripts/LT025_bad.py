"""The losses of several batches are added up, with one backward pass."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(16)]
PIECES = 4

total = 0.0
for number, (x, y) in enumerate(data, 1):
    total = total + F.mse_loss(model(x), y) / PIECES  # made
    if number % PIECES == 0:
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = 0.0

print("holder", "global variable 'total'")
print("bytes", (PIECES - 1) * (2 * ACTIVATION + 4 * ROWS))
