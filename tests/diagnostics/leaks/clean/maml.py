"""Learning to learn: each task's loss after a step of gradients that have a graph, summed up."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())


def after_a_step(x, y):
    weights = dict(model.named_parameters())
    loss = F.mse_loss(functional_call(model, weights, (x,)), y)
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    fast = {name: weight - 0.1 * g for (name, weight), g in zip(weights.items(), gradients)}
    return F.mse_loss(functional_call(model, fast, (x,)), y)


for _ in range(4):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(3):
        total = total + after_a_step(torch.randn(64, 16), torch.randn(64, 1))
    total.backward()
    optimizer.step()
