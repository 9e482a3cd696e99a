"""Q-learning: a replay buffer of observations, a target network that follows by averaging."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters())
memory, observation = [], torch.randn(64)
for _ in range(40):
    with torch.no_grad():
        action = model(observation[None]).argmax().item()
    following = torch.randn(64)
    memory.append((observation, action, 1.0, following))
    observation = following
    if len(memory) < 16:
        continue
    drawn = [memory[n] for n in torch.randint(len(memory), (256,)).tolist()]
    before, after = torch.stack([t[0] for t in drawn]), torch.stack([t[3] for t in drawn])
    with torch.no_grad():
        returns = 1.0 + 0.9 * target(after).amax(1)
    optimizer.zero_grad()
    F.mse_loss(model(before).amax(1), returns).backward()
    optimizer.step()
    with torch.no_grad():
        for parameter, slow in zip(model.parameters(), target.parameters(), strict=True):
            slow.mul_(0.99).add_(parameter, alpha=0.01)
