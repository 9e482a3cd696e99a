"""Memory snapshots of PyTorch: theirs opened as a timeline, ours written for PyTorch's own viewer. Needs no torch.

| file | what is in it |
|---|---|
| `plain_pickle.py` | a pickle reader that makes nothing but plain data |
| `pickle_checks.py` | what a pickle would make, told before any of it is made |
| `entry_checks.py` | that a snapshot's entries have what they are read for |
| `read.py` | the file: its devices, its settings |
| `history.py` | what happened on a device, rebuilt from the end backwards and told forwards |
| `stack_frames.py` | what a stack says: the operator, and the line of the user's program |
| `write.py` | a timeline as a snapshot, placed by the simulated allocator |
"""
