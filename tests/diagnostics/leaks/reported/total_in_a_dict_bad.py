"""A running total in a dict of metrics, weighted by the rows."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
LAYERS = 100
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

metrics = {"loss": 0.0, "rows": 0}
for _ in range(6):
    optimizer.zero_grad()
    loss = F.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 8))  # made
    loss.backward()
    metrics["loss"] += loss * 4
    metrics["rows"] += 4
    optimizer.step()

print("code", "LT023")
print("holder", "global variable 'metrics' -> ['loss']")
print("bytes", 577 * (3 * LAYERS + 3) + 107 * (3 * LAYERS + 4))
