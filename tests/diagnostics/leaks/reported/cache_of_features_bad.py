"""A cache holds the features of each example."""

from functools import cache

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

data = torch.randn(16, 256, 64)


@cache
def features_of(index):
    return model[:4](data[index])


for step in range(12):
    y = torch.randint(0, 64, (256,))
    loss = criterion(model[4](features_of(step)), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT021")
print("holder", "global variable 'features_of' -> cache")
print("bytes", 6291456)
print("fix", "limit the cache of `features_of`")
