"""A running sum of detached losses."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]

total = 0.0
for x, y in data:
    optimizer.zero_grad()
    loss = F.l1_loss(model(x), y)  # made
    total = total + loss.detach()
    loss.backward()
    optimizer.step()
