"""Train an image classifier under bfloat16 autocast, with each layer in a checkpoint with `--checkpoint`.

    python examples/mixed_precision.py
    python examples/mixed_precision.py --checkpoint

The model is ViT of transformers with random weights, and the switch is transformers' own.
"""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--rows", type=int, default=16)
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

config = ViTConfig(
    hidden_size=192,
    intermediate_size=768,
    num_hidden_layers=args.layers,
    num_attention_heads=4,
    image_size=64,
    patch_size=8,
    num_labels=10,
)
model = ViTForImageClassification(config).to(device).train()
if args.checkpoint:
    model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for step in range(args.steps):
    images = torch.randn(args.rows, 3, 64, 64, device=device)
    labels = torch.randint(10, (args.rows,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(images, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
