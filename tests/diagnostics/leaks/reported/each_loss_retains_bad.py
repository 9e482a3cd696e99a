"""Each of two losses keeps the graph, the last one too."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = model[:4], model[4]

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


both = Two()
for step in range(8):
    x, y = torch.randn(256, 64), torch.randint(0, 32, (256,))
    features, logits = both(x)
    losses = [criterion(logits, y), features.square().mean()]
    for part in losses:
        part.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()

print("code", "LT003")
print("holder", "list 'losses'")
print("fix", "remove `retain_graph=True`")
