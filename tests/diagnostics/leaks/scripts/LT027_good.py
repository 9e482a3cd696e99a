"""BatchNorm before the checkpointed block, and one in evaluation mode inside."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval(), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.block, self.norm(self.first(x)), use_reentrant=False)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()
