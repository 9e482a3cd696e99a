"""Predictions in a list of a nested dict: the list is named, not the dict."""

import torch
from torch import nn

torch.manual_seed(0)
ROWS, WIDTH, STEPS = 64, 256, 8
model = nn.Sequential(nn.Linear(32, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = {"train": {"loss": [], "predicted": []}, "validation": {"loss": [], "predicted": []}}  # holder
for _ in range(STEPS):
    optimizer.zero_grad()
    predicted = model(torch.randn(ROWS, 32))  # made
    loss = predicted.square().mean()
    history["train"]["predicted"].append(predicted.detach())
    loss.backward()
    optimizer.step()
    history["train"]["loss"].append(loss.item())
    del predicted

print("code", "LT021")
print("holder", "list 'history' ['train']['predicted'][8 entries]")
print("bytes", STEPS * 4 * ROWS * WIDTH)
print("fix", "store less in `history['train']['predicted']`")
