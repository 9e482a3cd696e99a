"""The CUDA caching allocator of torch, simulated byte for byte in pure Python.

| file | what is in it |
|---|---|
| `config.py` | the settings, from the text in `PYTORCH_ALLOC_CONF` |
| `block_sizes.py` | what a request is rounded to, and the segment it is cut from |
| `blocks.py` | blocks, and the free ones in the order in which they are looked for |
| `caching.py` | the allocator: best fit, splitting, merging, retry |
| `segment_addresses.py` | where the driver puts segments |
| `expandable_segments.py` | the same with expandable segments |
| `simulation.py` | an event stream through it: the peaks, and whether it fits |
| `traces.py` | what a real allocator did, and the same requests replayed |
"""
