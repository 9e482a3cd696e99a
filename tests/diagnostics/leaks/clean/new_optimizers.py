"""An optimizer made anew after each backward pass, and dropped after its update."""

import gc

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)])
for _ in range(10):
    loss = model(torch.randn(256, 512)).square().mean()
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.step()
    del optimizer, loss
    gc.collect()
