"""Behaviours of CUDA by which a step's memory differs from its memory on the CPU: one file per subject.

| file | content |
|---|---|
| `op_registry.py` | the registry: behaviours with their sources, and the code that rests on each |
| `attention.py` | the choice of a kernel for attention |
| `attention_flash.py`, `attention_mem_efficient.py` | saved tensors and scratch memory of these kernels |
| `normalization.py` | fused statistics |
| `sync_batch_norm.py` | `SyncBatchNorm` |
| `autocast.py` | the precision of operators, and the cache of casts |
| `matmul.py` | workspaces of cuBLAS |
| `convolution.py` | layouts; workspaces of cuDNN, known only within bounds |
| `rnn.py` | cuDNN's recurrent layers |
| `indexing.py` | sorting in the backward of embeddings and of indexing |
| `reductions.py` | partial sums |
| `pooling.py`, `softmax.py` | copies of tensors in other memory layouts |
| `dropout.py` | masks of one byte per element |
| `optimizers.py` | updates of all parameters at once |
| `op_table.py` | the table of all operators |
"""
