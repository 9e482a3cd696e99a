"""Predictions of `bench/xmem.py` for training runs that others measured, rebuilt from their protocol.

rows.py       the measured runs, the estimates of other tools, and runs that can't be rebuilt
models.py     the runs' models, without memory
training.py   the runs' training loops
predicting.py the estimate of one run
records.py    predictions, as records
scores.py     errors, and claims about them
reasons.py    reasons for large errors
page.py       all results as Markdown
"""
