"""Results that refer to nothing but their output, with the garbage collector off."""

import gc

import torch
from torch import nn

gc.disable()
ROWS, WIDTH, STEPS = 64, 256, 8

torch.manual_seed(0)


class Result:
    def __init__(self, output):
        self.output = output

    def mean(self):
        return self.output.mean().item()


model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    result = Result(model(torch.randn(ROWS, 64)))  # made
    result.output.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
