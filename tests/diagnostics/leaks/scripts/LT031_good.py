"""A discriminator trained on images without the generator's graph."""

import torch
from torch import nn
from torch.nn.functional import softplus

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
discriminator = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-4)

for _ in range(6):
    real, noise = torch.randn(64, 64), torch.randn(64, 32)
    of_discriminator.zero_grad()
    fake = generator(noise)
    loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    loss = softplus(-discriminator(fake)).mean()
    loss.backward()
    of_generator.step()
    del fake, loss
