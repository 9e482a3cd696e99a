"""The state of an LSTM is detached after each step."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model, head, state = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 8), None
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
for _ in range(8):
    optimizer.zero_grad()
    hidden, state = model(torch.randn(16, 20, 32), state)
    F.cross_entropy(head(hidden).flatten(0, 1), torch.randint(8, (320,))).backward()
    optimizer.step()
    state = tuple(part.detach() for part in state)
