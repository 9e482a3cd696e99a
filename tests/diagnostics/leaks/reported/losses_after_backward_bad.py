"""A list of losses after their backward passes, of a model of many layers."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
LAYERS = 100
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

losses = []  # holder
for _ in range(6):
    optimizer.zero_grad()
    losses.append(F.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 8)))  # made
    losses[-1].backward()
    optimizer.step()

print("code", "LT023")
print("holder", "list 'losses' [6 entries]")
print("bytes", 577 * (3 * LAYERS + 1) + 107 * (3 * LAYERS + 2))
