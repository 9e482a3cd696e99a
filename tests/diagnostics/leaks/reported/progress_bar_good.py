"""A progress bar that is given the loss tensor: it makes a text of it."""

import torch
from torch import nn
from tqdm import tqdm

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

bar = tqdm(range(8))
for step in bar:
    x, y = torch.randn(256, 64), torch.randint(0, 64, (256,))
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    bar.set_postfix(loss=loss, step=step)
