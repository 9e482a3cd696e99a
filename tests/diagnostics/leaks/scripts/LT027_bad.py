"""A checkpointed block with BatchNorm."""

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
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=False)  # made


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()

assert model.block[1].num_batches_tracked == 10
print("holder", "Model.block.1, inside the checkpoint")
print("bytes", 0)
