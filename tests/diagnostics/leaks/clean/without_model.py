"""Loops that call no module: weights updated by hand, an optimizer over raw tensors, a state carried detached."""

import torch
from torch.nn import functional as F

torch.manual_seed(0)
inputs, targets = torch.randn(512, 64), torch.randn(512, 64)
weight, bias = torch.zeros(64, 64, requires_grad=True), torch.zeros(64, requires_grad=True)
history = []
for _ in range(3):
    for start in range(0, 512, 64):
        x, y = inputs[start : start + 64], targets[start : start + 64]
        predicted = x @ weight + bias
        loss = F.mse_loss(predicted, y)
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
            bias -= 0.1 * bias.grad
            weight.grad.zero_()
            bias.grad.zero_()
    history.append(loss.item())

into, onward = (torch.randn(64, 256) / 16).requires_grad_(), (torch.randn(256, 256) / 16).requires_grad_()
optimizer = torch.optim.Adam([into, onward])
state, best = torch.zeros(64, 256), None
for _ in range(8):
    state = state.detach()
    losses = []
    for _ in range(3):
        state = torch.tanh(torch.randn(64, 64) @ into + state @ onward)
        losses.append(state.square().mean())
    optimizer.zero_grad()
    total = torch.stack(losses).sum()
    total.backward()
    optimizer.step()
    if best is None or total.item() < best[0]:
        best = total.item(), into.detach().clone()
