"""A target network gives the value to learn, with gradients."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

target = copy.deepcopy(model)
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    value = torch.randn(256) + 0.9 * target(x).amax(1)
    (model(x).amax(1) - value).square().mean().backward()
    del value
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT024")
print("holder", "target: ")
print("fix", "under `torch.no_grad()`, and call `target.zero_grad()` once")
