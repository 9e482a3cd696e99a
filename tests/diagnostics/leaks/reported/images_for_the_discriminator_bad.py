"""A generator is trained first, then the discriminator on new images, with the generator's graph."""

import torch
from torch import nn
from torch.nn.functional import softplus

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
discriminator = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-4)

for _ in range(6):
    of_generator.zero_grad()
    loss = softplus(-discriminator(generator(torch.randn(64, 32)))).mean()
    loss.backward()
    of_generator.step()
    of_discriminator.zero_grad()
    images = generator(torch.randn(64, 32))  # made
    loss = softplus(-discriminator(torch.randn(64, 64))).mean() + softplus(discriminator(images)).mean()
    loss.backward()
    of_discriminator.step()
    del images, loss

print("code", "LT031")
print("holder", "generator: ")
print("bytes", sum(4 * p.numel() for p in generator.parameters()))
print("fix", "`.detach()` the output of `generator`")
