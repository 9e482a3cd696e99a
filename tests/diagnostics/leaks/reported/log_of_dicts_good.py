"""A log of dicts with small detached values, and an evaluation in inference mode."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

log = []
for step in range(12):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    log.append({"step": step, "loss": loss.detach(), "norm": model[0].weight.norm().item()})
    if step % 4 == 3:
        model.eval()
        with torch.inference_mode():
            log[-1]["accuracy"] = (model(x).argmax(1) == y).float().mean().item()
        model.train()
