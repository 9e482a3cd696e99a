"""A backbone that no optimizer uses, behind a trained layer."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
first, backbone = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(first.parameters(), lr=0.01)

for _ in range(6):
    optimizer.zero_grad()
    backbone(first(torch.randn(ROWS, WIDTH))).square().mean().backward()
    optimizer.step()

print("code", "LT024")
print("holder", "backbone: ")
print("fix", "`backbone.requires_grad_(False)`")
print("bytes", sum(4 * p.numel() for p in backbone.parameters()))
