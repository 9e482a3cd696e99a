"""A loop in functions and a class, with closures and a scheduler; the model is called with keywords."""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = model

    def forward(self, x, y=None):
        output = self.body(x)
        return {"loss": F.mse_loss(output, y), "output": output}


class Trainer:
    def __init__(self):
        self.net = Net()
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.losses = []

    def step(self, x, y):
        result = self.net(x=x, y=y)

        def closure():
            return result["loss"]

        closure().backward()
        optimizer.step()
        optimizer.zero_grad()
        self.scheduler.step()
        self.losses.append(result["loss"].detach())

    def fit(self):
        for x, y in batches():
            self.step(x, y)


Trainer().fit()
