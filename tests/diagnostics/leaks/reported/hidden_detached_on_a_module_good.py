"""A recurrent model carries its hidden state on itself, and detaches it."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(64, 256), nn.Linear(256, 10)
        self.hidden = torch.zeros(64, 256)

    def forward(self, x):
        self.hidden = self.cell(x, self.hidden.detach())
        return self.head(self.hidden)


model = Carrying()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8):
    loss = F.cross_entropy(model(torch.randn(64, 64)), torch.randint(0, 10, (64,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
