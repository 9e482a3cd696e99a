"""A momentum encoder and a queue of its keys: a buffer, and a deque that is still filling."""

from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256

torch.manual_seed(0)


def network(out=1):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def batches():
    for _ in range(7):
        yield torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)


keys = network(WIDTH)
query = network(WIDTH)
keys.load_state_dict(query.state_dict())
optimizer.add_param_group({"params": list(query.parameters())})
queue = F.normalize(torch.randn(4 * ROWS, WIDTH))
recent = deque(maxlen=3)
start = 0
for x, _ in batches():
    q = F.normalize(query(x + 0.1 * torch.randn_like(x)))
    with torch.no_grad():
        for mine, theirs in zip(keys.parameters(), query.parameters()):
            mine.lerp_(theirs, 0.001)
        k = F.normalize(keys(x + 0.1 * torch.randn_like(x)))
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone().T], dim=1) / 0.07
    loss = F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.long))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    queue[start : start + ROWS] = k
    recent.append(k)
    start = (start + ROWS) % (4 * ROWS)
