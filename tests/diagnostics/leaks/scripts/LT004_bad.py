"""Gradients with a graph, of parameters that the optimizer does not zero."""

import torch
from torch import nn
from torch.nn import functional as F

import lowtide

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]

for step, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)  # made
    loss.backward(create_graph=step == 1)
    optimizer.step()
    del loss

gradients = sum(4 * p.numel() for p in model.parameters())
with lowtide.measure() as memory:
    model.zero_grad()
print("holder", "gradient graph of parameter '0.weight' and 1 more (create_graph)")
print("bytes", -memory.timeline.curve[-1] - gradients)
