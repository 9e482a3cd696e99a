"""Hooks on every layer append detached activations to the lists of a dict."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

activations = {}


def hook_of(name):
    def hook(module, args, output):
        activations.setdefault(name, []).append(output.detach())

    return hook


for name, layer in model.named_children():
    layer.register_forward_hook(hook_of(name))
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    criterion(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT013")
print("holder", "forward hook registered at")
print("fix", "store a number or a small copy")
