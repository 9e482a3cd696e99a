"""A list of what is needed of them."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]

predictions = []  # holder
for x, y in data:
    optimizer.zero_grad()
    logits = model(x)  # made
    loss = F.mse_loss(logits, y.expand(-1, WIDTH))
    predictions.append(logits.argmax(-1))
    del logits
    loss.backward()
    optimizer.step()
