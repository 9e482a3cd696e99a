"""How CUDA behaves where a step on it takes other memory than one on the CPU: a file a subject, a row a behaviour.

| file | what is in it |
|---|---|
| `op_record.py` | a row: what happens, and where that is written |
| `attention.py` | which kernel attention takes |
| `attention_flash.py`, `attention_mem_efficient.py` | what that kernel saves and takes inside |
| `normalization.py` | fused statistics |
| `autocast.py` | which operators run in which precision, and the cache of casts |
| `matmul.py` | workspaces of cuBLAS |
| `convolution.py` | layouts; workspaces of cuDNN, of which only bounds are known |
| `rnn.py` | cuDNN's recurrent layers |
| `indexing.py` | sorting in the backward of embeddings and of indexing |
| `reductions.py` | partial sums |
| `optimizers.py` | all parameters at once |
| `op_table.py` | all rows |
"""
