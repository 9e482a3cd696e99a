"""A frozen network whose features are compared still requires gradients."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

features = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
decoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
optimizer = torch.optim.Adam(decoder.parameters())
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
    nn.functional.l1_loss(features(decoder(x)), torch.zeros(256, 512)).backward()
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT024")
print("holder", "features: ")
print("fix", "requires_grad_(False)")
