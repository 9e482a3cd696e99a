"""Lines that end in a number."""

import code

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]


def step(x, y):
    optimizer.zero_grad()
    loss = F.l1_loss(model(x), y)  # made
    loss.backward(retain_graph=True)
    optimizer.step()
    return loss


interpreter = code.InteractiveInterpreter(locals=globals())
for number in range(len(data)):
    interpreter.runsource(f"step(*data[{number}]).item()", symbol="single")
