"""Log-probabilities of all episodes stay in the list that each loss is made of."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
optimizer, saved = torch.optim.Adam(model.parameters()), []
for _ in range(6):
    for _ in range(5):
        choice = torch.distributions.Categorical(logits=model(torch.randn(32, 64)))
        saved.append(choice.log_prob(choice.sample()))
    (-torch.stack(saved[-5:]).mean()).backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT008")
print("holder", "list 'saved' [30 entries]")
print("fix", "if the loss is computed from the entries, clear them after its backward pass")
