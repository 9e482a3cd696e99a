"""The plainest loop, with its output and loss in variables, and a validation without gradients."""

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


history = []
for epoch in range(2):
    model.train()
    for x, y in batches():
        output = model(x)
        loss = F.mse_loss(output, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    model.eval()
    with torch.no_grad():
        for x, y in batches():
            error = F.mse_loss(model(x), y)
