"""Train over epochs and batches with AdamW and cross entropy, and print the loss and the memory now and then.

    python examples/training_loop.py
    python examples/training_loop.py --checkpoint

Memory is that of a GPU, if there is one.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH, CLASSES = 1000, 96, 192, 4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Classifier(nn.Module):
    """Classifier of the mean of a transformer encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(args.layers)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if args.checkpoint else layer(hidden)
        return self.head(hidden.mean(1))


tokens = torch.randint(VOCABULARY, (args.rows * args.steps, LENGTH))
loader = DataLoader(TensorDataset(tokens, tokens[:, 0] % CLASSES), batch_size=args.rows, shuffle=True)
model = Classifier().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

for epoch in range(args.epochs):
    model.train()
    for number, (x, labels) in enumerate(loader):
        x, labels = x.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), labels)
        loss.backward()
        optimizer.step()
        if number % 2 == 0:
            print(f"epoch {epoch}, batch {number}: loss {loss.item()}")
    if device == "cuda":
        print(f"allocated {torch.cuda.memory_allocated() / 2**20:.0f} MiB")
        print(f"reserved {torch.cuda.memory_reserved() / 2**20:.0f} MiB")
