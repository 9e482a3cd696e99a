"""A copy of the parameters is kept after each epoch."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

states = []
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    criterion(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    states.append(copy.deepcopy(model.state_dict()))

print("code", "LT021")
print("holder", "list 'states' [8 entries]['2.weight'] and 2 more of each entry")
print("fix", "store less in `states[..]['2.weight']`")
