"""An object whose method is a hook keeps the activations."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))
optimizer = torch.optim.Adam(model.parameters())


class Recorder:
    def __init__(self, module):
        self.activations = None
        module.register_forward_hook(self.record)

    def record(self, module, args, output):
        self.activations = output


recorder = Recorder(model[1])
for _ in range(6):
    loss = F.cross_entropy(model(torch.randn(64, 64)), torch.randint(0, 10, (64,)))  # made
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT013")
print("holder", "forward hook registered at")
print("bytes", 4 * 64 * 512)
print("fix", "clear the store each step, or remove the hook")
