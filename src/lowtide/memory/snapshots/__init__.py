"""Memory snapshots of PyTorch: theirs opened as a timeline, ours written for PyTorch's own viewer. Needs no torch.

| file | what is in it |
|---|---|
| `plain.py` | a pickle reader that makes nothing but plain data |
| `opcodes.py` | what a pickle would make, told before any of it is made |
| `entries.py` | that a snapshot's entries have what they are read for |
| `reading.py` | the file: its devices, its settings |
| `history.py` | what happened on a device, rebuilt from the end backwards and told forwards |
| `frames.py` | what a stack says: the operator, and the line of the user's program |
| `writing.py` | a timeline as a snapshot, placed by the simulated allocator |
| `reduction.py` | sizes, order and streams alone: an allocator trace |
| `summary.py` | the peak and what is alive there, reserved beside allocated, what lies idle |
"""
