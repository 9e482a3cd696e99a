"""The output is dropped before backward."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]


def train(x, y):
    optimizer.zero_grad()
    outputs = model(x)  # made
    loss = ((outputs + 1).exp() - y).abs().mean()
    del outputs
    loss.backward()
    optimizer.step()


for x, y in data:
    train(x, y)
