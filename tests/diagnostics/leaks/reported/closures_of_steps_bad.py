"""Closures that report later each hold the outputs of their step, in a cell."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

reports = []


def train_step(x, y):
    logits = model(x)
    loss = criterion(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    reports.append(lambda: (logits.argmax(1) == y).float().mean())


for step in range(8):
    train_step(torch.randn(256, 64), torch.randint(0, 64, (256,)))

print("code", "LT021")
print("holder", "reports' [8 entries].logits")
print("bytes", 524288)
print("fix", "store less in `reports[..].logits`")
