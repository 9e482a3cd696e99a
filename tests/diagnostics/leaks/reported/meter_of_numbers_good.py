"""Average meters of numbers."""

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


meters = {"loss": AverageMeter(), "error": AverageMeter()}
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    loss, predicted = criterion(logits := model(x), y), logits.detach()
    meters["loss"].update(loss.item(), len(x))
    meters["error"].update((predicted.argmax(1) != y).float().mean())
    del logits, predicted
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
