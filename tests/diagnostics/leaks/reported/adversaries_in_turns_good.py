"""A generator and a discriminator in turns; what the second sees is detached."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128))
critic = nn.Sequential(nn.Linear(128, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
of_generator, of_critic = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
criterion, real, fake, history = nn.BCEWithLogitsLoss(), torch.ones(64, 1), torch.zeros(64, 1), []
for _ in range(8):
    generator.zero_grad()
    critic.zero_grad()
    made = generator(torch.randn(64, 32))
    loss = criterion(critic(torch.randn(64, 128)), real) + criterion(critic(made.detach()), fake)
    loss.backward()
    of_critic.step()
    critic.zero_grad()
    loss = criterion(critic(made), real)
    loss.backward()
    of_generator.step()
    history.append(loss.item())
    del made
