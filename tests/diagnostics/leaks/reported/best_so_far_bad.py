"""The best loss so far is kept with its graph, which a backward pass retains."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

best = {}
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    loss = criterion(model(x), y)
    if "loss" not in best:
        best["loss"] = loss
    loss.backward(retain_graph=True)
    del loss
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT003")
print("holder", "'best' -> ['loss']")
print("fix", "`.detach()` the tensors in `best`")
