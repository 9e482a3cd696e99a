"""Average meters, of which one is given a penalty that no backward pass reaches."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


meters = {"loss": AverageMeter(), "penalty": AverageMeter()}
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    loss = criterion(model(x), y)
    penalty = model(x).square().mean()
    meters["loss"].update(loss, len(x))
    meters["penalty"].update(penalty)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT009")
print("holder", "'meters' -> ['penalty'].")
print("fix", "pass `meters['penalty']` values without a graph")
