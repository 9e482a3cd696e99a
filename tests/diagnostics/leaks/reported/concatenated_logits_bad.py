"""An evaluation that concatenates the logits of each batch to all before."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, BATCHES = 64, 256, 32
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    optimizer.zero_grad()
    F.mse_loss(model(torch.randn(ROWS, WIDTH)), torch.zeros(ROWS, WIDTH)).backward()
    optimizer.step()

model.eval()


def evaluate():
    gathered = None
    with torch.no_grad():
        for _ in range(BATCHES + 1):
            logits = model(torch.randn(ROWS, WIDTH))
            gathered = logits if gathered is None else torch.cat((gathered, logits))
    return (gathered.argmax(-1) == 0).float().mean()


evaluate()

print("code", "LT030")
print("holder", "local variable 'gathered'")
print("bytes", (BATCHES - 1) * ACTIVATION)
