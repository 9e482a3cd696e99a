"""A reference model that backward reaches."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


policy, reference = network(), network()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)

for _ in range(6):
    x = torch.randn(ROWS, WIDTH)
    optimizer.zero_grad()
    target = reference(x)  # made
    loss = F.mse_loss(policy(x), target)
    loss.backward()
    optimizer.step()
    del target, loss

print("holder", "reference: ")
print("bytes", sum(4 * p.numel() for p in reference.parameters()) + 2 * ACTIVATION)
