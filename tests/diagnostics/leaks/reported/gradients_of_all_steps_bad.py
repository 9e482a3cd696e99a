"""The gradients of each step are kept for a statistic."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer, gradients = torch.optim.SGD(model.parameters(), lr=0.01), []
for _ in range(8):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(512, 256)), torch.randint(10, (512,))).backward()
    gradients.append([parameter.grad for parameter in model.parameters()])
    optimizer.step()

print("code", "LT021")
print("holder", "list 'gradients' [")  # with as many entries as at the last look, which slow machines take earlier
