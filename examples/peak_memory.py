"""Print the peak of one forward and backward of a GPT with and without checkpoints, without an optimizer.

    python examples/peak_memory.py                                  # on a GPU
    lowtide estimate --device "rtx 4090" examples/peak_memory.py    # for a GPU that is not here

The same two numbers, with a GPU or without.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
args = parser.parse_args()

ROWS, LENGTH, VOCABULARY = 4, 512, 50257


def peak_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Return the largest number of bytes allocated during one forward and backward."""
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    loss = model(tokens).logits.mean()
    loss.backward()
    return torch.cuda.max_memory_allocated()


if torch.cuda.is_available():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.width // 64,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).to("cuda").train()
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), device="cuda")
    print(f"plain: {peak_bytes(model, tokens) / 2**20:.0f} MiB")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    print(f"every block in a checkpoint: {peak_bytes(model, tokens) / 2**20:.0f} MiB")
else:
    print("There is no GPU here: lowtide estimate --device NAME runs this program for one.")
