"""Several losses of one trunk, summed; and two backward passes through it, the first retaining."""

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


other = nn.Linear(1, 1)
for step, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    output = model(x)
    losses = {"value": F.mse_loss(output, y), "size": output.square().mean(), "other": other(output).abs().mean()}
    if step % 2:
        sum(losses.values()).backward()
    else:
        losses["value"].backward(retain_graph=True)
        (losses["size"] + losses["other"]).backward()
    optimizer.step()
