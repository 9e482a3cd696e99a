"""Behaviours of CUDA with which a step needs other memory than on the CPU: a file per subject.

| file | content |
|---|---|
| `op_registry.py` | the registry: behaviours with their sources, and the code that rests on each |
| `attention.py` | the choice of attention's kernel |
| `attention_flash.py`, `attention_mem_efficient.py` | saved tensors and scratch memory of that kernel |
| `normalization.py` | fused statistics |
| `sync_batch_norm.py` | `SyncBatchNorm` |
| `autocast.py` | the precision of operators, and the cache of casts |
| `matmul.py` | workspaces of cuBLAS |
| `convolution.py` | layouts; workspaces of cuDNN, known only within bounds |
| `rnn.py` | cuDNN's recurrent layers |
| `indexing.py` | sorting in the backward of embeddings and of indexing |
| `reductions.py` | partial sums |
| `optimizers.py` | all parameters at once |
| `op_table.py` | all operators |
"""
