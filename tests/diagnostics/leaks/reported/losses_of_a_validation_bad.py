"""A validation without no_grad gathers its losses, and returns their mean: one mistake, two holders."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())


def validate():
    model.eval()
    losses = []
    for _ in range(6):
        losses.append(F.cross_entropy(model(torch.randn(256, 128)), torch.randint(10, (256,))))  # made
    model.train()
    return torch.stack(losses).mean()


for _ in range(4):
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(256, 128)), torch.randint(10, (256,))).backward()
        optimizer.step()
    score = validate()

print("code", "LT002")
print("holder", "global variable 'score'")
print("fix", "under `torch.no_grad()`")
