"""Train a language model on a batch that is split into pieces, whose gradients add up before each update.

    python examples/accumulation.py                # the whole batch at once
    python examples/accumulation.py --pieces 4     # the same batch from four pieces

The gradients are the same up to rounding, since sums are formed in another order.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--pieces", type=int, default=1)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--rows", type=int, default=8)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

VOCABULARY, LENGTH = 1000, 128
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# Dropout would draw another mask for each split of the batch.
config = GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=LENGTH,
    n_embd=192,
    n_layer=args.layers,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
    use_cache=False,
)
model = GPT2LMHeadModel(config).to(device).train()
model.loss_type = "ForCausalLM"
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(args.steps):
    tokens = torch.randint(VOCABULARY, (args.rows, LENGTH), device=device)
    total = 0.0
    for piece in tokens.chunk(args.pieces):
        loss = model(piece, labels=piece).loss / args.pieces
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(step, total)
