"""A running total of losses after backward, of a model of many layers."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
LAYERS = 100
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

total = 0.0
for _ in range(6):
    optimizer.zero_grad()
    loss = F.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 8))  # made
    loss.backward()
    total += loss
    optimizer.step()

nodes = 3 * LAYERS + 2  # AddmmBackward0, TBackward0 and TanhBackward0 a layer, MseLossBackward0 and AddBackward0
slots = 3 * LAYERS + 2  # two, none and one a layer, two and none
print("holder", "global variable 'total'")
print("bytes", 577 * nodes + 107 * slots)
