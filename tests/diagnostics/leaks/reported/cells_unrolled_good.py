"""A recurrent cell that is unrolled: the last state is a small part of the whole graph."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
cell, head = nn.LSTMCell(64, 128), nn.Linear(128, 64)
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
for _ in range(6):
    x = torch.randn(64, 64)
    hidden = memory = torch.zeros(64, 128)
    loss = 0.0
    for _ in range(20):
        hidden, memory = cell(x, (hidden, memory))
        loss = loss + F.mse_loss(head(hidden), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
