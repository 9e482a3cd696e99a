"""Weights under spectral norm, which torch computes once where they are registered, with a graph that nothing needs."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(0)
critic = nn.Sequential(spectral_norm(nn.Linear(512, 512)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(512, 1)))
optimizer = torch.optim.Adam(critic.parameters())
for _ in range(6):
    optimizer.zero_grad()
    critic(torch.randn(64, 512)).square().mean().backward()
    optimizer.step()
