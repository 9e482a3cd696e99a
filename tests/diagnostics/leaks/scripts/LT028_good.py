"""A checkpoint behind a frozen layer that needs no gradients of its inputs."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(checkpoint(self.block, self.embedding(x), use_reentrant=False))


model = Model()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()
