"""A module attends to the detached keys of the last two batches, too."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.recent = nn.Linear(64, 192), []

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        keys, values = (torch.cat([*(pair[n] for pair in self.recent), own], 1) for n, own in enumerate((k, v)))
        self.recent.append((k.detach().clone(), v.detach().clone()))
        del self.recent[:-2]
        return F.scaled_dot_product_attention(q, keys, values)


model = Remembering()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8):
    loss = model(torch.randn(8, 64, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
