"""A replay buffer whose entries are tuples."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

buffer = []  # holder
for number in range(8):
    optimizer.zero_grad()
    values = model(torch.randn(ROWS, WIDTH))  # made
    loss = values.square().mean()
    loss.backward()
    optimizer.step()
    buffer.append((number, values.detach()))
    del values

print("code", "LT021")
print("holder", "list 'buffer' [8 entries][1]")
print("fix", "`buffer[..][1]`")
print("bytes", 8 * ACTIVATION)
