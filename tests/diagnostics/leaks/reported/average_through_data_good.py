"""An average of weights that is written through `.data`, with gradients on."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

average = copy.deepcopy(model)
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    criterion(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.data = 0.99 * old + 0.01 * new
