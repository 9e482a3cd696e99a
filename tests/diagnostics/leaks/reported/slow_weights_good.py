"""Slow weights that follow the fast ones each five steps (lookahead)."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())
slow = [parameter.detach().clone() for parameter in model.parameters()]
for step in range(12):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(64, 128)), torch.randint(10, (64,))).backward()
    optimizer.step()
    if step % 5 == 4:
        with torch.no_grad():
            for parameter, anchor in zip(model.parameters(), slow, strict=True):
                anchor.lerp_(parameter, 0.5)
                parameter.copy_(anchor)
