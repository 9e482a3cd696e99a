"""Outputs are joined to one tensor, step by step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))
optimizer = torch.optim.Adam(model.parameters())
embeddings = torch.empty(0, 256)
for _ in range(12):
    output = model(torch.randn(256, 64))
    loss = output.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    embeddings = torch.cat([embeddings, output.detach()])
    del output

print("code", "LT021")
print("holder", "global variable 'embeddings'")
print("bytes", 12 * 256 * 256 * 4)
print("fix", "store less in `embeddings`")
