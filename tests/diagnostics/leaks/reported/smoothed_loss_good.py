"""An exponential average of losses that is detached."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

smoothed = None
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    loss = criterion(model(x), y)
    smoothed = loss.detach() if smoothed is None else 0.9 * smoothed + 0.1 * loss.detach()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
