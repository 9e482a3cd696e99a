"""Entries of a list of dicts: the features hold the memory, the losses four bytes."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
head = nn.Linear(WIDTH, 10)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)

kept = []  # holder
for _ in range(8):
    optimizer.zero_grad()
    features = model(torch.randn(ROWS, WIDTH))  # made
    loss = F.cross_entropy(head(features), torch.randint(10, (ROWS,)))
    kept.append({"loss": loss, "features": features})
    loss.backward()
    optimizer.step()

print("code", "LT021")
print("holder", "list 'kept' [8 entries]['features']")
print("fix", "`kept[..]['features']`")
print("bytes", 8 * ACTIVATION)
