"""A teacher inside the trained module, whose optimizer does not have it."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
WIDTH, ROWS, LAYERS = 128, 256, 4


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
        self.student = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.mse_loss(self.student(x), self.teacher(x))


model = Distillation()
optimizer = torch.optim.SGD(model.student.parameters(), lr=0.01)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(ROWS, WIDTH)).backward()
    optimizer.step()

parameters = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
print("code", "LT024")
print("holder", "model.teacher: ")
print("bytes", parameters + (LAYERS - 1) * 4 * ROWS * WIDTH)  # mse_loss needs the last output anyway
print("fix", "call `model.teacher` under `torch.no_grad()`")
