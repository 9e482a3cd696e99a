"""Features are collected by class in a defaultdict of lists."""

from collections import defaultdict

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

by_class = defaultdict(list)
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 64, (256,))
    features = model[:4](x)
    loss = criterion(model[4](features), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for label in range(4):
        by_class[label].append(features[y == label])

print("code", "LT008")
print("holder", "dict 'by_class' [4 entries][8 entries]")
print("fix", "store less in `by_class`: a number, or `.detach().cpu()`")
