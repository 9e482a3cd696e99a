"""Log-probabilities of an episode are gathered in a list for one backward pass."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

for _ in range(6):
    log_probabilities, rewards = [], []
    for _ in range(4):
        choice = torch.distributions.Categorical(logits=model(torch.randn(128, 64)))
        log_probabilities.append(choice.log_prob(choice.sample()))
        rewards.append(torch.randn(128))
        del choice
    loss = -(torch.stack(log_probabilities) * torch.stack(rewards)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
