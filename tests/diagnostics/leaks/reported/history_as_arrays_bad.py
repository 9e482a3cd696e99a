"""A list of arrays that share the memory of outputs: one finding, although a variable holds the last one, too."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512))
optimizer = torch.optim.Adam(model.parameters())
history = []  # holder
for _ in range(8):
    output = model(torch.randn(256, 64))  # made
    loss = output.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(output.detach().numpy())

print("code", "LT021")
print("holder", "list 'history'")
print("fix", "store less in `history`")
