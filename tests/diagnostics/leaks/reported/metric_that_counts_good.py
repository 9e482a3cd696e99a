"""A metric counts as it goes."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()


class Accuracy:
    def __init__(self):
        self.right, self.total = torch.tensor(0), torch.tensor(0)

    def update(self, preds, target):
        self.right += (preds.argmax(1) == target).sum()
        self.total += target.numel()

    def compute(self):
        return self.right / self.total


metric = Accuracy()
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 64, (256,))
    logits = model(x)
    loss = criterion(logits, y)
    metric.update(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
metric.compute()
