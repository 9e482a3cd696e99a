"""Train a BERT classifier whose encoder layers are called one by one, each in a checkpoint with `--checkpoint`.

    python examples/bert_layers.py
    python examples/bert_layers.py --checkpoint

The model is BERT of transformers with random weights, and the task is made up: only memory and time are of interest.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH = 2000, 128, 192
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Classifier(nn.Module):
    """BERT classifier that calls the encoder layers one by one, with a linear head on the first token."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.bert.embeddings(tokens)
        mask = mask[:, None, None, :].bool()  # [rows, 1, 1, length]: True where a token may be looked at
        for layer in self.bert.encoder.layer:
            if args.checkpoint and self.training:
                hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, mask)
        return self.head(hidden[:, 0])


model = Classifier().to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for step in range(args.steps):
    tokens = torch.randint(VOCABULARY, (args.rows, LENGTH), device=device)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (args.rows, 1), device=device)
    mask = torch.arange(LENGTH, device=device) < lengths
    labels = tokens[:, 1] % 2
    loss = F.cross_entropy(model(tokens, mask), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
