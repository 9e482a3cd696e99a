"""torch's own CheckpointFunction keeps what it needs on its ctx."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4))
head = nn.Linear(WIDTH, 10)
optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], lr=0.01)

for _ in range(6):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    loss = F.cross_entropy(head(x), torch.randint(10, (ROWS,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del x
