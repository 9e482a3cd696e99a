"""Items of a data set keep the activations they are given."""

import torch
from torch import nn

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)


class Item:
    embedding = None


items = [Item() for _ in range(ROWS)]  # holder
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
head = nn.Linear(WIDTH, 1)
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)

for step in range(8):
    optimizer.zero_grad()
    batch = items[8 * step : 8 * step + 8]
    hidden = model(torch.randn(8, ROWS, WIDTH))  # made
    for item, row in zip(batch, hidden):
        item.embedding = row
    loss = head(torch.stack([item.embedding.mean(0) for item in batch])).square().mean()
    del hidden, row
    loss.backward()
    optimizer.step()

print("holder", "list 'items' [64 entries].embedding")
print("bytes", 8 * 8 * ACTIVATION)
