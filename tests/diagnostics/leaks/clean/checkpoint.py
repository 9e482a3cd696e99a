"""Blocks under checkpointing."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 64, 256

torch.manual_seed(0)


def network(out=1):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def batches():
    for _ in range(7):
        yield torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)


first, second = model[:2], model[2:]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([first, second])

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


whole = Checkpointed()
for x, y in batches():
    optimizer.zero_grad()
    loss = F.mse_loss(whole(x), y)
    loss.backward()
    optimizer.step()
