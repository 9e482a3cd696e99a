"""Memory snapshots of PyTorch: read as a timeline, and written for PyTorch's own viewer. Needs no torch.

| file | contents |
|---|---|
| `plain_pickle.py` | a pickle reader that builds nothing but plain data |
| `pickle_checks.py` | a check of a pickle's memory needs before it is loaded |
| `entry_checks.py` | a check of the types and sizes of the fields that are read |
| `read.py` | the file: its devices, its settings |
| `history.py` | the events on a device, rebuilt from the end backwards and replayed forwards |
| `stack_frames.py` | the operator, and the line of the user's program, in a stack |
| `write.py` | a timeline as a snapshot, placed by the simulated allocator |
"""
