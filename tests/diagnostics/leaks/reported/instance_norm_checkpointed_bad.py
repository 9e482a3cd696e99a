"""Instance norms that track statistics, in blocks that are checkpointed one after the other."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

torch.manual_seed(0)
blocks = [
    nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, track_running_stats=True)) for _ in range(4)
]
body, head = nn.Sequential(*blocks), nn.Linear(8, 4)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
for _ in range(6):
    optimizer.zero_grad()
    hidden = checkpoint_sequential(body, 2, torch.randn(2, 8, 8, 8), use_reentrant=False)
    head(hidden.mean((2, 3))).square().mean().backward()
    optimizer.step()

print("code", "LT027")
print("holder", "Sequential.")
