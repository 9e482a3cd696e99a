"""Gradients accumulated over micro-batches."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256

torch.manual_seed(0)


def network(out=1):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def batches():
    for _ in range(7):
        yield torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)


running = 0.0
for step in range(5):
    for number, (x, y) in enumerate(batches()):
        loss = F.mse_loss(model(x), y) / 7
        loss.backward()
        running += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
