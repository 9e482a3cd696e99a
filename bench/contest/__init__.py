"""The contest of `bench/peers.py`: other ways to save activation memory, and Lowtide, on the same training steps.

models.py     the six models, each with one batch of random data
ways.py       the other ways: checkpointing, selective checkpointing, compiled budgets, torch-remat
step.py       one training step: its exact peak, its exact FLOPs, its bits
pieces.py     the time of a step: the sum of each piece's fastest run
turns.py      the times of several steps that take turns
running.py    the whole contest for one model
records.py    the results
claims.py     claims about Lowtide, and whether the results support them
page.py       the results as Markdown
frontiers.py  the results as pictures
allocator.py  the settings of malloc under which everything runs
"""
