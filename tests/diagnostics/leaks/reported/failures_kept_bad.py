"""The exceptions of batches that failed are kept for a report, with the frames of the step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

failed = []


def train_step(x, y, step):
    logits = model(x)
    loss = criterion(logits, y)
    if step % 2:
        raise ValueError(f"step {step}: the loss is {loss.item():.2f}")
    loss.backward()
    optimizer.step()


for step in range(8):
    try:
        train_step(torch.randn(256, 64), torch.randint(0, 64, (256,)), step)
    except ValueError as error:
        failed.append(error)
    optimizer.zero_grad()

print("code", "LT015")
print("holder", "list 'failed' [4 entries]")
print("fix", "do not keep the exception")
