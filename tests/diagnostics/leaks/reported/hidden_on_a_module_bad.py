"""A recurrent model carries its hidden state on itself, with its graph."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()


class Carrying(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(256, 64)
        self.register_buffer("w", torch.randn(64, 256) / 8)
        self.bias = nn.Parameter(torch.zeros(256))
        self.hidden = torch.zeros(64, 256)

    def forward(self, x):
        self.hidden = torch.tanh(x @ self.w + self.bias + self.hidden)
        return self.head(self.hidden)


model = Carrying()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(8):
    loss = criterion(model(torch.randn(64, 64)), torch.randint(0, 64, (64,)))
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT011")
print("holder", "Carrying.hidden")
print("fix", "`self.hidden = self.hidden.detach()` before the next forward")
