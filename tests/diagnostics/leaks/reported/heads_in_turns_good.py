"""Two heads on one trunk, each with its own backward pass: the trunk gets both gradients."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
trunk = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
first, second = nn.Linear(256, 10), nn.Linear(256, 10)
optimizer = torch.optim.Adam([*trunk.parameters(), *first.parameters(), *second.parameters()])
for _ in range(6):
    optimizer.zero_grad()
    features, labels = trunk(torch.randn(64, 64)), torch.randint(0, 10, (64,))
    of_first = F.cross_entropy(first(features), labels)
    of_first.backward(retain_graph=True)
    of_second = F.cross_entropy(second(features), labels)
    of_second.backward()
    optimizer.step()
