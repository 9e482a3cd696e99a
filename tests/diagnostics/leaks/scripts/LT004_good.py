"""Gradients with a graph that are given back."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]

for x, y in data:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)  # made
    loss.backward(create_graph=True)
    optimizer.step()
    model.zero_grad()
    del loss
