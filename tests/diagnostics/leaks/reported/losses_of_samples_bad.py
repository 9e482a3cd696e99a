"""The loss of each sample is kept by its number, for sampling by importance."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

importance = {}
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    importance.update((256 * step + number, loss) for number, loss in enumerate(losses))
    losses.mean().backward(retain_graph=True)
    del losses
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT008")
print("holder", "dict 'importance' [")
print("fix", "store numbers in `importance`")
