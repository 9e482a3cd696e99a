"""What `bench/xmem.py` predicts, and beside what: training runs measured by others, rebuilt from their protocol.

rows.py       the runs that were measured, what estimators said of them, and which can't be rebuilt
models.py     their models, without memory
training.py   their training loops
predicting.py one run, estimated
records.py    what was predicted
scores.py     errors, and what is claimed of them
reasons.py    why some are far off
page.py       all of it as Markdown
"""
