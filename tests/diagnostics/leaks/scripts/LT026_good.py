"""A function made in a loop is checkpointed, with the block bound."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda t, block=block: t + block(t), x, use_reentrant=False)
        return x


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()
