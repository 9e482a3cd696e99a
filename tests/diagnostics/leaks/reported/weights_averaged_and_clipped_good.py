"""Averaged weights, clipped gradients, a schedule, and losses as numbers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
optimizer, average, history = torch.optim.AdamW(model.parameters()), AveragedModel(model), []
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for _ in range(10):
    x = torch.randn(256, 128)
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    history.append(loss.item())
with torch.no_grad():
    F.mse_loss(average(x), x)
