"""The models that `lowtide demo` trains: four real ones, on data from Python and from installed packages.

demo_packages.py  the packages that the demo needs, with helpful errors; no network access
text_batches.py   Python's own reference as training text: tokens, windows, masked windows
models.py         GPT-2, BERT, Llama and ResNet from transformers, each with its batches and its loss
workloads.py      `workload("gpt2")`: one of the models as a training step that can be reset to its initial bits
training.py       the loop, and digests that reveal any bit that differs between two runs
compare.py        `compare(work, plain, budgets)`: the loop within each budget, beside the plain one and checkpointing
results.py        the results of all runs, as records
results_table.py  a table of the records for people
"""
