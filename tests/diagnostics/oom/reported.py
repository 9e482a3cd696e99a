# ruff: noqa: E501, RUF001  (messages stand as programs print them)
"""Reported kinds of out-of-memory output: the right cause, the first advice, and words that must or must not be there.

The amounts and names are made up. `says` and `never` are patterns over the whole explanation.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reported:
    name: str
    cause: str
    advice: str
    text: str
    says: str = ""
    never: str = "(?!)"
    certain: bool = True


def cuda(tried: str, total: str, free: str, process: str, allocated: str, unallocated: str, kind: str = "CUDA") -> str:
    return (
        f"torch.OutOfMemoryError: {kind} out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of {total} "
        f"of which {free} is free. Including non-PyTorch memory, this process has {process} memory in use. Of the "
        f"allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by PyTorch but unallocated."
    )


FULL = cuda("96.00 MiB", "23.64 GiB", "31.81 MiB", "23.60 GiB", "23.11 GiB", "48.60 MiB")
ADAM = """Traceback (most recent call last):
  File "/home/u/train.py", line 88, in <module>
    optimizer.step()
  File "/opt/v/lib/python3.12/site-packages/torch/optim/adamw.py", line 162, in _init_group
    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
"""

REPORTED = [
    # --- the numbers decide
    Reported(
        "more free than requested, on ROCm",
        "driver",
        "rocm-smi",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 4.00 MiB. GPU 5 has a total capacity of 287.98 "
        "GiB of which 198.11 GiB is free. Of the allocated memory 71.20 GiB is allocated by PyTorch, and 15.40 GiB is "
        "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        says="198 GiB are free",
        never=r"(?i)fragment|fit\(|nvidia",
    ),
    Reported(
        "more free than requested, with much reserved",
        "driver",
        "nvidia-smi",
        cuda("2.00 GiB", "79.15 GiB", "30.02 GiB", "49.00 GiB", "30.00 GiB", "18.00 GiB"),
        never="(?i)fragment|expandable|true-need",
    ),
    Reported(
        "a small request that needs a segment larger than what is free",
        "true-need",
        "lowtide.fit(",
        cuda("4.00 MiB", "23.64 GiB", "11.81 MiB", "23.60 GiB", "23.11 GiB", "48.60 MiB"),
        never="driver refused",
    ),
    Reported(
        "a fraction that is rounded to two decimals",
        "cap",
        "torch.cuda.set_per_process_memory_fraction",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 "
        "GiB of which 243.10 GiB is free. 1.10 GiB allowed; Of the allocated memory 1060.01 MiB is allocated by "
        "PyTorch, with 18.00 MiB allocated in private pools (e.g., HIP Graphs), and 60.99 MiB is reserved by PyTorch "
        "but unallocated.",
        says="memory fraction \\(1.1 GiB\\)",
        never="nvidia",
    ),
    Reported(
        "one allocation on Intel",
        "cap",
        "below 4 GiB",
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 15.11 "
        "GiB. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
        "unallocated. Please use `empty_cache` to release all unoccupied cached memory.",
        says="4 GiB",
        never=r"nvidia|torch\.cuda|CUDA_",
    ),
    Reported(
        "one allocation on Intel, of IPEX",
        "cap",
        "below 4 GiB",
        "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate 6.10 "
        "GiB (GPU  0; 15.56 GiB total capacity; 0 bytes already allocated; 0 bytes reserved in total by PyTorch)",
        says="6.1 GiB were requested",
        never=r"nvidia|torch\.cuda",
    ),
    Reported(
        "nothing is held on MPS",
        "driver",
        "virtual machine",
        "RuntimeError: MPS backend out of memory (MPS allocated: 0 bytes, other allocations: 0 bytes, max allowed: 7.93 "
        "GB). Tried to allocate 256 bytes on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper "
        "limit for memory allocations (may cause system failure).",
        never=r"7\.53|fit\(|torch\.cuda",
    ),
    Reported(
        "another process, one number in claim and advice",
        "other-process",
        "nvidia-smi",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.34 GiB (GPU 0; 24.00 GiB total capacity; 18.21 GiB "
        "already allocated; 0 bytes free; 20.12 GiB reserved in total by PyTorch)",
        says=r"2\.88 GiB of the device[\s\S]*\[2\.88 GiB\]",
        never=r"3\.88",
    ),
    Reported(
        "another process on ROCm",
        "other-process",
        "rocm-smi",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.98 "
        "GiB of which 4.00 MiB is free. Of the allocated memory 9.20 GiB is allocated by PyTorch, and 100.44 MiB is "
        "reserved by PyTorch but unallocated.",
        says="HIP_VISIBLE_DEVICES",
        never="CUDA_VISIBLE|nvidia",
    ),
    Reported(
        "another process on Ascend",
        "other-process",
        "npu-smi",
        "RuntimeError: NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 29.50 GiB total capacity; 9.60 GiB already "
        "allocated; 9.60 GiB current active; 3.67 MiB free; 9.84 GiB reserved in total by PyTorch) If reserved memory "
        "is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        says="ASCEND_RT_VISIBLE_DEVICES",
        never=r"nvidia|torch\.cuda|CUDA_",
    ),
    Reported(
        "a tiny mapping",
        "cap",
        "vm.max_map_count",
        "RuntimeError: unable to mmap 56 bytes from file </torch_2041_118>: Cannot allocate memory (12)",
        says="ulimit",
    ),
    Reported(
        "too many open files",
        "cap",
        "ulimit -n",
        "RuntimeError: unable to open shared memory object </torch_29919_1396182366> in read-write mode: Too many open "
        "files (24)",
        never=r"fit\(|dev/shm is full",
    ),
    Reported(
        "one buffer of Metal",
        "huge-tensor",
        "find the operation that allocates it",
        "RuntimeError: Invalid buffer size: 9.54 GiB",
        says=r"9\.54 GiB",
        never=r"torch\.cuda|nvidia",
    ),
    Reported(
        "logits of a set on the host",
        "huge-tensor",
        "logits of all 200000 evaluation rows",
        "numpy.core._exceptions.MemoryError: Unable to allocate 2.77 TiB for an array with shape (200000, 77, 49408) and "
        "data type float32",
        never=r"SDPA|scaled_dot|accumulate\(",
    ),
    Reported(
        "all pairs of rows",
        "huge-tensor",
        "all pairs of rows",
        "MemoryError: Unable to allocate 1.12 TiB for an array with shape (392000, 392000) and data type float64",
        never=r"SDPA|accumulate\(|logits",
    ),
    # --- the place decides
    Reported("Adam's first step", "optimizer-first-step", "fused=True", ADAM + FULL),
    Reported(
        "Adam's first step, in a JSON log",
        "optimizer-first-step",
        "fused=True",
        '{"level": "ERROR", "message": "' + (ADAM + FULL).replace('"', '\\"').replace("\n", "\\n") + '"}',
    ),
    Reported(
        "Adam's first step, with prefixes of a logger",
        "optimizer-first-step",
        "fused=True",
        "\n".join(f"2026-11-25 10:14:02,118 | ERROR | worker-3 | {line}" for line in (ADAM + FULL).splitlines()),
    ),
    Reported(
        "Adam's first step, of rich",
        "optimizer-first-step",
        "fused=True",
        r"""│ C:\sd\venv\lib\site-packages\torch\optim\adamw.py:114 in _init_group            │
│ ❱ 114 │   │   │   │   state['exp_avg_sq'] = torch.zeros_like(p, memory_format=torch.pr │
╰──────────────────────────────────────────────────────────────────────────────────────╯
OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.99 GiB
total capacity; 22.56 GiB already allocated; 0 bytes free; 23.05 GiB reserved in total
by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb to
avoid fragmentation.""",
        never="expandable",
    ),
    Reported(
        "Adam's first step, in a notebook",
        "optimizer-first-step",
        "fused=True",
        """OutOfMemoryError                          Traceback (most recent call last)
Cell In[7], line 12
     10 loss.backward()
---> 12 optimizer.step()

File /opt/v/lib/python3.12/site-packages/torch/optim/adam.py:150, in Adam._init_group(self, group, params)
    148 state["step"] = torch.tensor(0.0)
--> 150 state["exp_avg"] = torch.zeros_like(p)

"""
        + FULL.removeprefix("torch."),
    ),
    Reported(
        "Adam's first step, in a notebook before IPython 8",
        "optimizer-first-step",
        "fused=True",
        """RuntimeError                              Traceback (most recent call last)
<ipython-input-9-f7a9d5b9c6ef> in <module>()
----> 3 optimizer.step()
/usr/local/lib/python3.7/dist-packages/torch/optim/adam.py in _init_group(self, group)
"""
        + FULL,
    ),
    Reported(
        "the optimizer of torch 0.4",
        "optimizer-first-step",
        "fused=True",
        """THCudaCheck FAIL file=/pytorch/aten/src/THC/generic/THCStorage.cu line=58 error=2 : out of memory
Traceback (most recent call last):
  File "train_vgg.py", line 61, in <module>
    optimizer.step()
  File "/opt/conda/lib/python3.6/site-packages/torch/optim/adam.py", line 92, in step
    denom = exp_avg_sq.sqrt().add_(group['eps'])
RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/generic/THCStorage.cu:58""",
        never="outside PyTorch|outside PyTorch",
    ),
    Reported(
        "a traceback before the error's own",
        "true-need",
        "lowtide.fit(",
        ADAM
        + "KeyError: 'exp_avg'\nstate was made anew\nTraceback (most recent call last):\n"
        + '  File "/home/u/train.py", line 70, in step\n    loss = model(x)\n'
        + FULL,
        never="optimizer",
    ),
    Reported(
        "what comes after the error",
        "true-need",
        "lowtide.fit(",
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 70, in step\n    loss = model(x)\n'
        + f"{FULL}\n\nDuring handling of the above exception, another exception occurred:\n\n{ADAM}ValueError: no state",
        never="optimizer",
    ),
    Reported(
        "an evaluation that gathers",
        "evaluation-gathers",
        "preprocess_logits_for_metrics",
        """  File "/opt/x/site-packages/transformers/trainer.py", line 2901, in evaluation_loop
    preds_host = logits if preds_host is None else nested_concat(preds_host, logits, padding_index=-100)
  File "/opt/x/site-packages/transformers/trainer_pt_utils.py", line 73, in torch_pad_and_concatenate
    result = tensor1.new_full(new_shape, padding_index)
RuntimeError: CUDA out of memory. Tried to allocate 5.46 GiB (GPU 0; 15.78 GiB total capacity; 13.38 GiB already
allocated; 600.75 MiB free; 13.81 GiB reserved in total by PyTorch)""",
        says="eval_accumulation_steps",
    ),
    Reported(
        "a checkpoint onto the GPU",
        "loading",
        'map_location="cpu"',
        """  File "/opt/x/train.py", line 20, in <module>
    ckpt = torch.load(path)
  File "/opt/x/site-packages/torch/serialization.py", line 1426, in _legacy_load
RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.38 GiB already
allocated; 12.75 MiB free; 9.61 GiB reserved in total by PyTorch)""",
    ),
    Reported(
        "pinned memory",
        "pinned-memory",
        "pin_memory=False",
        """RuntimeError: Caught RuntimeError in pin memory thread for device 0.
Original Traceback (most recent call last):
  File "/opt/x/site-packages/torch/utils/data/_utils/pin_memory.py", line 37, in do_one_step
    data = pin_memory(data, device)
RuntimeError: CUDA error: out of memory""",
    ),
    Reported(
        "Triton's launch",
        "not-pytorch",
        "nvidia-smi",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        says="Triton",
    ),
    Reported(
        "Triton's shared memory",
        "cap",
        "block sizes",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. "
        "Reducing block sizes or `num_stages` may help.",
        never=r"fit\(|nvidia-smi",
    ),
    Reported(
        "NCCL's buffers",
        "not-pytorch",
        "run one collective",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        says="NCCL could not allocate",
    ),
    Reported(
        "Triton's launch, by place",
        "not-pytorch",
        "rocm-smi",
        'Traceback (most recent call last):\n  File "/v/site-packages/triton/backends/amd/driver.py", line 495, in '
        "__call__\nRuntimeError: HIP error: out of memory",
        says="Triton",
        never="nvidia",
    ),
    # --- further messages
    Reported(
        "cudaMallocAsync",
        "true-need",
        "lowtide.fit(",
        """torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)
Currently allocated     : 6.42 GiB
Requested               : 128.00 MiB
Device limit            : 8.00 GiB
Free (according to CUDA): 0 bytes
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB""",
        says=r"128 MiB  requested\n +8 GiB  capacity\n +0 B  free\n +6\.42 GiB  in use",
        never="1717986",
    ),
    Reported(
        "cudaMallocAsync with a fraction",
        "cap",
        "set_per_process_memory_fraction",
        """torch.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of memory)
Currently allocated     : 3.92 GiB
Requested               : 128.00 MiB
Device limit            : 24.00 GiB
Free (according to CUDA): 19.10 GiB
PyTorch limit (set by user-supplied memory fraction)
                        : 4.00 GiB""",
        says="4 GiB",
    ),
    Reported(
        "Windows' paging file, in German",
        "host-memory",
        "paging file",
        r"OSError: [WinError 1455] Die Auslagerungsdatei ist zu klein, um diesen Vorgang durchzuführen. Error loading "
        r'"C:\t\lib\site-packages\torch\lib\cudnn_cnn_infer64_8.dll" or one of its dependencies.',
    ),
    Reported(
        "Windows' paging file, of safetensors",
        "host-memory",
        "paging file",
        "OSError: 页面文件太小，无法完成操作。 (os error 1455)",
    ),
    Reported(
        "Colab",
        "host-memory",
        "stream the data set",
        "Your session crashed after using all available RAM. If you are interested in access to high-RAM runtimes, you "
        "may want to check out Colab Pro.",
        says="RAM",
    ),
    Reported(
        "Jupyter",
        "host-memory",
        "watch RAM",
        "Kernel Restarting\nThe kernel appears to have died. It will restart automatically.",
        certain=False,
    ),
    Reported(
        "VS Code's notebook",
        "host-memory",
        "watch RAM",
        "The Kernel crashed while executing code in the current cell or a previous cell.",
        certain=False,
    ),
    Reported(
        "Kubernetes, JSON",
        "host-memory",
        "resources.limits.memory",
        '{"containerID":"containerd://ab","exitCode":137,"finishedAt":"2024-02-01T21:50:51Z","reason":"OOMKilled"}',
        says="OOMKilled",
        never="not always",
    ),
    Reported(
        "Kubernetes, described",
        "host-memory",
        "resources.limits.memory",
        "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137",
        never="not always",
    ),
    Reported(
        "exit code 137 in JSON",
        "host-memory",
        "dmesg",
        '{"Status": "exited", "OOMKilled": false, "ExitCode": 137}',
        says="not always",
        certain=False,
    ),
    Reported("Slurm's srun", "host-memory", "--mem", "srun: error: gpu17: task 0: Out Of Memory", says="Slurm"),
    Reported(
        "Slurm's daemon",
        "host-memory",
        "--mem",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1123.0. Some of the step tasks have been OOM Killed.",
        says="Slurm",
    ),
    Reported(
        "PBS",
        "host-memory",
        "qsub",
        "=>> PBS: job killed: mem 67113984kb exceeded limit 67108864kb",
        says="64 GiB of 64 GiB were in use",
    ),
    Reported("LSF", "host-memory", "bsub -M", "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit."),
    Reported(
        "AWS Batch", "host-memory", "resourceRequirements", "OutOfMemoryError: Container killed due to memory usage"
    ),
    Reported(
        "accelerate",
        "true-need",
        "free_memory()",
        "RuntimeError: No executable batch size found, reached zero.",
        certain=False,
    ),
    Reported(
        "detectron2",
        "true-need",
        "IMS_PER_BATCH",
        "Attempting to copy inputs of <function pairwise_iou at 0x7f> to CPU due to CUDA OOM",
    ),
    Reported(
        "shared memory",
        "cap",
        "--shm-size",
        "OSError: [Errno 28] No space left on device: '/dev/shm/torch_2311_99'",
    ),
    Reported(
        "shared memory, by place",
        "cap",
        "--shm-size",
        'Traceback (most recent call last):\n  File "/usr/lib/python3.12/multiprocessing/heap.py", line 83, in __init__\n'
        "OSError: [Errno 28] No space left on device",
        says="/dev/shm",
        certain=False,
    ),
    Reported(
        "Gaudi",
        "true-need",
        "smaller batches",
        "RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 (1024)MB",
        says="1 GiB  requested",
        never=r"nvidia|torch\.cuda",
    ),
    Reported(
        "DirectML",
        "true-need",
        "smaller batches",
        "RuntimeError: Could not allocate tensor with 3221225472 bytes. There is not enough GPU video memory available!",
        says="3 GiB  requested",
        never=r"nvidia|torch\.cuda",
    ),
    Reported(
        "Neuron",
        "true-need",
        "smaller batches",
        "ERROR TDRV:dmem_alloc_internal Failed to alloc DEVICE memory: 134217728",
        says="neuron-top",
        never=r"nvidia|torch\.cuda",
    ),
    Reported(
        "XLA",
        "true-need",
        "smaller batches",
        "RuntimeError: Resource exhausted: Ran out of memory in memory space hbm. Used 18.30G of 15.48G hbm. Exceeded hbm "
        "capacity by 2.82G.",
        says=r"15\.5 GiB  capacity",
        never=r"nvidia|torch\.cuda",
    ),
    Reported(
        "JAX",
        "true-need",
        "smaller batches",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 "
        "bytes.",
        says="8 GiB  requested",
        never=r"torch\.cuda|fit\(",
    ),
    Reported(
        "Ray",
        "host-memory",
        "num_cpus",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory. Memory on the node was "
        "15.22GB / 16.00GB (0.951), which exceeds the memory usage threshold of 0.95.",
        says="Ray",
    ),
    Reported(
        "CuPy",
        "cap",
        "pool limit",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,147,483,648 bytes (allocated so far: 7,516,192,768 "
        "bytes, limit set to: 8,589,934,592 bytes).",
        says="2 GiB more would exceed the fraction",
    ),
    Reported("docker's list", "host-memory", "dmesg", "Exited (137) 3 minutes ago", certain=False),
    Reported(
        "Kaggle",
        "host-memory",
        "stream",
        "Your notebook tried to allocate more memory than is available. It has restarted.",
    ),
    Reported(
        "HTCondor",
        "host-memory",
        "request_memory",
        "Error from slot1_3@n17: Job has gone over memory limit of 4096 megabytes. Peak usage: 4133 megabytes.",
    ),
    Reported(
        "JAX, a request",
        "true-need",
        "smaller batches",
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 3.00GiB (3221225472B) on device "
        "ordinal 0",
        says="3 GiB  requested",
    ),
    Reported(
        "TensorFlow",
        "true-need",
        "smaller batches",
        "ResourceExhaustedError: OOM when allocating tensor with shape[256,128,64,64] and type float on GPU:0",
        never=r"fit\(",
    ),
    Reported(
        "PBS, of a whole job",
        "host-memory",
        "qsub",
        "=>> PBS: job killed: mem job total 33556788 kb exceeded limit 33554432kb",
        says="32 GiB of 32 GiB were in use",
    ),
    Reported(
        "a worker that is gone",
        "host-memory",
        "num_workers",
        "RuntimeError: DataLoader worker (pid(s) 2311, 2312) exited unexpectedly",
        certain=False,
    ),
    Reported(
        "two ranks",
        "true-need",
        "lowtide.fit(",
        f"[rank0]: {FULL}\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a total capacity of "
        "79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 60.00 GiB memory in use. "
        "Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is allocated by PyTorch, and 1.02 "
        "GiB is reserved by PyTorch but unallocated.",
        says=r"rank 0[\s\S]*\[true-need\][\s\S]*rank 1[\s\S]*\[other-process\][\s\S]*process 9911",
    ),
    Reported(
        "two ranks, each with its place",
        "optimizer-first-step",
        "fused=True",
        "\n".join(f"[rank0]: {line}" for line in (ADAM + FULL).splitlines())
        + '\n[rank1]: Traceback (most recent call last):\n[rank1]:   File "/a/train.py", line 5, in f\n'
        + f"[rank1]: {FULL.replace('96.00', '98.00')}",
        says=r"rank 0[\s\S]*\[optimizer-first-step\][\s\S]*rank 1[\s\S]*\[true-need\]",
    ),
]
