"""A second try inside `except`."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]


def forward(x, y, fails):
    loss = F.l1_loss(model(x), y)  # made
    if fails:
        raise RuntimeError("out of memory")
    return loss


for step, (x, y) in enumerate(data):
    optimizer.zero_grad()
    try:
        loss = forward(x, y, fails=step == 2)
    except RuntimeError:
        loss = forward(x[::2], y[::2], fails=False)
    loss.backward()
    optimizer.step()
    del loss

print("holder", "exception being handled (RuntimeError)")
print("bytes", 2 * ACTIVATION + 2 * 4 * ROWS + 4)
