"""Of the output a number is kept, and the next forward assigns its variable again."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]

for x, y in data:
    optimizer.zero_grad()
    predicted = model(x)  # made
    F.mse_loss(predicted, y.expand(-1, WIDTH)).backward()
    optimizer.step()
    last = predicted.mean().item()
