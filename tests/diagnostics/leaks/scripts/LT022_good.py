"""A moving average of the weights, without a graph."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(5)]

average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
for x, y in data:
    optimizer.zero_grad()
    loss = F.l1_loss(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * parameter
