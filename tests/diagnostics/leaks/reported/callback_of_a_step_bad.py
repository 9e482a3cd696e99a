"""A callback made in each step closes over its outputs."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

callback = None


def train_step(x, y):
    global callback
    hidden = model[:4](x)
    loss = criterion(model[4](hidden), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    def callback():
        return hidden.mean()


for step in range(8):
    train_step(torch.randn(256, 64), torch.randint(0, 64, (256,)))

print("code", "LT007")
print("holder", "closure of 'callback'")
print("bytes", 524288)
print("fix", "delete the function that holds `hidden`")
