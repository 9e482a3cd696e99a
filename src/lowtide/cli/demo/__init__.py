"""What `lowtide demo` trains: four real models on data that comes with Python and with installed packages.

packages.py   the packages it needs, asked for in words; nothing reaches for a network
text.py       Python's own reference as training text: tokens, windows, masked windows
models.py     GPT-2, BERT, Llama and ResNet from transformers, each with its batches and its loss
workloads.py  `workload("gpt2")`: one of them as a training step that can be set back to its first bit
training.py   `train(work, steps)`: the loop, and digests that say whether two runs were the same bit by bit
contest.py    `compare(work, plain, budgets)`: the loop within each budget, beside the plain one and checkpointing
comparison.py what that found, as records
table.py      those records for people
"""
