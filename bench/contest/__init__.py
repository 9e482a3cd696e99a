"""The contest of `bench/peers.py`: other ways to save activation memory, and Lowtide, on the same training steps.

models.py     the six models, each with one batch of random data
ways.py       the others: checkpointing, selective checkpointing, compiled budgets, torch-remat
step.py       one training step: its exact peak, its exact FLOPs, its bits
pieces.py     its time: of each piece the fastest
turns.py      the times of several steps that take turns
running.py    the whole contest for one model
records.py    what it found
claims.py     what is claimed, and whether it held
page.py       all of it as Markdown
frontiers.py  and as pictures
allocator.py  the settings of malloc under which everything runs
"""
