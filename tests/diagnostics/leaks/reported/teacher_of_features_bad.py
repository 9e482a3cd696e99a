"""A teacher inside the trained module, called with features that the module computes and detached afterwards."""

import torch
from torch import nn

torch.manual_seed(0)
WIDTH, ROWS = 128, 2048


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.teacher = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        features = self.features(x)
        return self.head(features + self.teacher(features).detach()).mean()


model = Distillation()
optimizer = torch.optim.SGD([*model.features.parameters(), *model.head.parameters()], lr=0.01)
for _ in range(6):
    optimizer.zero_grad()
    model(torch.randn(ROWS, 8)).backward()
    optimizer.step()

print("code", "LT002")
print("holder", "nothing after the forward of Distillation.teacher")
print("bytes", 4 * ROWS * WIDTH)  # forward holds the features and the teacher's output anyway
