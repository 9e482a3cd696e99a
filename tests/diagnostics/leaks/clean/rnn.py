"""Truncated backpropagation through time: a cell called in a loop, its state detached between steps."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256

torch.manual_seed(0)


def network(out=1):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def batches():
    for _ in range(7):
        yield torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)


cell = nn.GRUCell(WIDTH, WIDTH)
optimizer.add_param_group({"params": list(cell.parameters())})
state = torch.zeros(ROWS, WIDTH)
for step in range(5):
    state = state.detach()
    losses = []
    optimizer.zero_grad()
    for x, y in batches():
        state = cell(x, state)
        losses.append(F.mse_loss(model(state), y))
    torch.stack(losses).mean().backward()
    optimizer.step()
