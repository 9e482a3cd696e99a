"""A recurrent state carried from step to step with its graph."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
cell = nn.RNNCell(WIDTH, WIDTH)
model = nn.Linear(WIDTH, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]

state = torch.zeros(ROWS, WIDTH)
for x, y in data:
    optimizer.zero_grad()
    cell.zero_grad()
    state = cell(x, state)  # made
    loss = F.l1_loss(model(state), y)
    loss.backward(retain_graph=True)
    optimizer.step()

print("holder", "global variable 'state'")
print("bytes", 6 * ACTIVATION + 4 * ROWS + 4)
