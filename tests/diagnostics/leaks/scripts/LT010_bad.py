"""A list of slices, each of which keeps all that it was cut out of."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)) for _ in range(5)]

predictions = []
for x, y in data:
    optimizer.zero_grad()
    logits = model(x)  # made
    predictions.append(logits[:, -1].detach())
    loss = F.mse_loss(logits, y.expand(-1, WIDTH))
    del logits
    loss.backward()
    optimizer.step()

print("holder", "list 'predictions' [5 entries]")
print("bytes", 5 * ACTIVATION)
