"""Simulate torch's CUDA caching allocator byte for byte in pure Python.

| file | contents |
|---|---|
| `config.py` | the settings, from the text in `PYTORCH_ALLOC_CONF` |
| `block_sizes.py` | rounded sizes of requests, and the segments they are cut from |
| `blocks.py` | blocks, and the free ones in search order |
| `caching.py` | the allocator: best fit, splitting, merging, retry |
| `segment_addresses.py` | addresses that the driver gives to segments |
| `expandable_segments.py` | the allocator with expandable segments |
| `simulation.py` | the peaks of an event stream in the allocator, and whether it fits |
"""
