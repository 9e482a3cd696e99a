"""A GAN: two optimizers, the generator detached for the discriminator, its graph alive past an optimizer step."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256

torch.manual_seed(0)


def network(out=1):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def batches():
    for _ in range(7):
        yield torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)


generator = network(WIDTH)
its_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
ones, zeros = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)
for real, _ in batches():
    model.zero_grad()
    output = model(real)
    loss_real = F.binary_cross_entropy_with_logits(output, ones)
    loss_real.backward()
    fake = generator(torch.randn(ROWS, WIDTH))
    output = model(fake.detach())
    loss_fake = F.binary_cross_entropy_with_logits(output, zeros)
    loss_fake.backward()
    loss_of_model = loss_real + loss_fake
    optimizer.step()
    generator.zero_grad()
    output = model(fake)
    loss_of_generator = F.binary_cross_entropy_with_logits(output, ones)
    loss_of_generator.backward()
    its_optimizer.step()
    del fake
