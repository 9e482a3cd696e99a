"""A teacher that is an average of the student, with gradients on."""

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 64, 256
ACTIVATION = 4 * ROWS * WIDTH  # bytes

torch.manual_seed(0)
student, teacher = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
optimizer = torch.optim.SGD(student.parameters(), lr=0.01)

for _ in range(8):
    optimizer.zero_grad()
    x = torch.randn(ROWS, WIDTH)
    F.mse_loss(student(x), teacher(x)).backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), student.parameters()):
            old.lerp_(new, 0.01)

print("code", "LT024")
print("holder", "teacher: ")
print("fix", "`torch.no_grad()`")
print("bytes", sum(4 * p.numel() for p in teacher.parameters()) + ACTIVATION)
