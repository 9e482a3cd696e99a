"""An exponential moving average of the weights, made at the first step."""

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


average = None
for x, y in batches():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        if average is None:
            average = {name: p.clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            average[name].lerp_(p, 0.01)
