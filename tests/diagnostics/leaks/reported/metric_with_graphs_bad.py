"""A metric keeps predictions with their graph until the end of the epoch."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()


class Accuracy:
    def __init__(self):
        self.preds, self.target = [], []

    def update(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

    def compute(self):
        preds, target = torch.cat(self.preds), torch.cat(self.target)
        return (preds.argmax(1) == target).float().mean()


metric = Accuracy()
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 64, (256,))
    logits = model(x)
    loss = criterion(logits, y)
    metric.update(logits.softmax(1), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
metric.compute()

print("code", "LT008")
print("holder", "metric' -> .preds[8 entries]")
print("fix", "store less in `metric.preds`: a number, or `.detach().cpu()`")
