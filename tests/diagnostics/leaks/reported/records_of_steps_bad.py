"""Results of each step are kept as records of a dataclass."""

from dataclasses import dataclass

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor


def train_step(x, y):
    logits = model(x)
    result = Result(loss=criterion(logits, y), logits=logits)
    result.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return result


results = []
for step in range(8):
    results.append(train_step(torch.randn(256, 64), torch.randint(0, 64, (256,))))

print("code", "LT021")
print("holder", "results' [8 entries].logits")
print("bytes", 524288)
print("fix", "store less in `results[..].logits`")
