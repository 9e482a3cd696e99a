"""Made images are kept for a picture, without need for their graph."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128))
critic = nn.Sequential(nn.Linear(128, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
optimizer, kept = torch.optim.Adam(generator.parameters()), []
for _ in range(8):
    generator.zero_grad()
    critic.zero_grad()
    made = generator(torch.randn(256, 32))
    (-critic(made).mean()).backward()
    optimizer.step()
    kept.append(made)

print("code", "LT021")
print("holder", "list 'kept' [8 entries]")
print("bytes", 8 * 256 * 128 * 4)
