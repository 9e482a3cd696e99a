"""The last losses in a deque of a fixed length."""

from collections import deque

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

last = deque(maxlen=3)
for step in range(10):
    x, y = torch.randn(256, 64), torch.randint(0, 64, (256,))
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    last.append(loss)
    mean = sum(value.item() for value in last) / len(last)
