"""Data points are dicts, and keep the activations they are given."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
points = [{"index": n, "hidden": None} for n in range(ROWS)]  # holder
model, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)

for step in range(8):
    optimizer.zero_grad()
    hidden = model(torch.randn(8, ROWS, WIDTH))  # made
    for n in range(8):
        points[8 * step + n]["hidden"] = hidden[n].detach()
    head(hidden).square().mean().backward()
    optimizer.step()
    del hidden

print("code", "LT029")
print("holder", "list 'points' [64 entries]['hidden']")
print("fix", "`points[..]['hidden']`")
print("bytes", 8 * 8 * ACTIVATION)
