"""An LSTM's state is carried as a tuple, with its graph."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model, head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)
state = (torch.zeros(1, ROWS, WIDTH), torch.zeros(1, ROWS, WIDTH))
for _ in range(8):
    output, state = model(torch.randn(ROWS, 4, WIDTH), state)  # made
    loss = head(output).square().mean()
    loss.backward(retain_graph=True)

print("code", "LT011")
print("holder", "global variable 'state'")
print("fix", "`state = tuple(t.detach() for t in state)`")
