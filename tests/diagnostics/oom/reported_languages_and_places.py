# ruff: noqa: E501  (messages stand as programs print them)
"""Kinds of output of systems in other languages, of log prefixes that name a program, and of places in tracebacks.

The amounts and names are made up.
"""

from diagnostics.oom.reported import Reported, cuda  # type: ignore[import-not-found]
from diagnostics.oom.reported_programs import traceback  # type: ignore[import-not-found]

PACKAGES = "/opt/v/lib/python3.12/site-packages/"
ENDED = [
    ("German", "lauf.sh: Zeile 4: 8123 Getötet                 python train.py"),
    ("Chinese", "run.sh: 行 3: 12345 已杀死               python train.py"),
    ("Taiwanese", "已砍掉"),
    ("Japanese", "train.sh: 12 行: 40021 強制終了            python train.py"),
    ("French", "Processus arrêté"),
    ("Spanish", "Terminado (killed)"),
    ("Russian", "./go.sh: строка 2: 991 Убито              python3 main.py"),
    ("Korean", "./go.sh: 줄 2: 991 죽었음              python3 main.py"),
]
REFUSED = [
    ("German", "OSError: [Errno 12] Nicht genügend Hauptspeicher verfügbar"),
    ("Chinese", "OSError: [Errno 12] 无法分配内存: 'model-00001-of-00004.safetensors'"),
    ("Japanese", "OSError: [Errno 12] メモリを確保できません"),
    ("French", "OSError: [Errno 12] Impossible d'allouer de la mémoire"),
]
FORKS = [
    ("Chinese", "bash: fork: 无法分配内存"),
    ("German", "-bash: fork: Kann Speicher nicht allozieren"),
    ("Japanese", "bash: fork: メモリを確保できません"),
]
SEED = [
    ("/w/train.py", "<module>", "torch.cuda.manual_seed_all(0)"),
    (f"{PACKAGES}torch/cuda/random.py", "cb", "default_generator.manual_seed(seed)"),
]

REPORTED = [
    *(
        Reported(f"a shell in {name}", "host-memory", "dmesg", text, says="often means out of memory", certain=False)
        for name, text in ENDED
    ),
    *(Reported(f"ENOMEM in {name}", "host-memory", "fewer DataLoader workers", text) for name, text in REFUSED),
    *(Reported(f"fork in {name}", "host-memory", "free -h", text, says="new process") for name, text in FORKS),
    # --- numbers
    Reported(
        "NumPy's amounts without decimals",
        "huge-tensor",
        "an unintended broadcast, or all pairs of rows",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 312. GiB for an array with shape (204800, 204800) and data type float64",
        says="one request of 312 GiB",
        never="DataLoader",
    ),
    Reported(
        "a size of ONNX Runtime that has overflowed",
        "huge-tensor",
        "print the sizes and lengths",
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. Name:'/embed/Conv' Status Message: bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*, bool) Failed to allocate memory for requested buffer of size 4585490524328388608",
        says="overflowed",
        never="arena|logits",
    ),
    Reported(
        "little is free beside a simulator",
        "other-process",
        "nvidia-smi",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 262.00 MiB (GPU 0; 23.54 GiB total capacity; 11.60 GiB already allocated; 570.50 MiB free; 12.30 GiB reserved in total by PyTorch)",
        says="processes that this one cannot see hold about 9.68 GiB of the device",
        never="memory is not what ran out",
    ),
    Reported(
        "Metal beside PyTorch, where a lower watermark fails earlier",
        "not-pytorch",
        "find the library",
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). Tried to allocate 292.50 MiB on private pool.",
        says=r"torch\.mps\.empty_cache",
        never=r"WATERMARK_RATIO=0\.\d|nvidia|handles and communicators",
    ),
    Reported(
        "the limit of a control group",
        "host-memory",
        "raise the limit: docker run --memory",
        "[  812.31] Memory cgroup out of memory: Killed process 9912 (python) total-vm:41234112kB, anon-rss:16701456kB, file-rss:71200kB, shmem-rss:2080kB, UID:0 pgtables:35000kB oom_score_adj:0",
        says="the limit of a container",
        never="the machine's",
    ),
    # --- programs
    Reported(
        "vLLM's worker, by its prefix",
        "true-need",
        "max_model_len",
        "(VllmWorker rank=0 pid=312) ERROR 05-02 10:00:00 [multiproc_executor.py:430] "
        + cuda("256.00 MiB", "79.11 GiB", "129.31 MiB", "78.97 GiB", "76.10 GiB", "312.00 MiB"),
        never=r"fit\(|accumulate\(|the step",
    ),
    Reported(
        "vLLM's engine, by its prefix",
        "true-need",
        "max_model_len",
        "(EngineCore_DP0 pid=9817) ERROR 01-06 12:41:40 [core.py:866] "
        + cuda("1.08 GiB", "62.47 GiB", "769.28 MiB", "61.60 GiB", "61.41 GiB", "138.26 MiB", "HIP"),
        never=r"fit\(|accumulate\(|nvidia",
    ),
    Reported(
        "ComfyUI with cudaMallocAsync",
        "true-need",
        "tiled VAE",
        "!!! Exception during processing !!! Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 6.42 GiB\nRequested               : 128.00 MiB\nDevice limit            : 8.00 GiB\nFree (according to CUDA): 0 bytes\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        says=r"6\.42 GiB",
        never=r"fit\(|accumulate\(",
    ),
    Reported(
        "TensorFlow, run eagerly",
        "true-need",
        "smaller batches",
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node __wrapped__Mul_device_/job:localhost/replica:0/task:0/device:GPU:0}} failed to allocate memory [Op:Mul]",
        says="set_memory_growth",
        never="JAX|PyTorch",
    ),
    Reported(
        "TensorFlow's tensor",
        "true-need",
        "smaller batches",
        "OOM when allocating tensor with shape[32768,4096] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
        says="set_memory_growth",
        never="JAX|PyTorch",
    ),
    Reported(
        "TensorRT 7",
        "not-pytorch",
        "a smaller workspace",
        "[03/07/2020-16:57:34] [E] [TRT] C:\\source\\rtSafe\\safeRuntime.cpp (25) - Cuda Error in nvinfer1::internal::DefaultAllocator::allocate: 2 (out of memory)",
    ),
    Reported(
        "tactics that TensorRT skips",
        "cap",
        "do nothing if the engine was built",
        "[W] UNSUPPORTED_STATESkipping tactic 0 due to insufficient memory on requested size of 11580055552 detected for tactic 0x0000000000000000.Try decreasing the workspace size with IBuilderConfig::setMemoryPoolLimit().",
        certain=False,
    ),
    Reported(
        "the thread that pins",
        "pinned-memory",
        "pin_memory=False",
        '  File "/opt/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1265, in _get_data\n    raise RuntimeError("Pin memory thread exited unexpectedly")\nRuntimeError: Pin memory thread exited unexpectedly',
        never="the error names the GPU",
        certain=False,
    ),
    # --- places
    Reported(
        "a seed on a full GPU",
        "other-process",
        "nvidia-smi",
        traceback(*SEED, error="RuntimeError: CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        says="no room for its context",
    ),
    Reported(
        "a device that is set",
        "other-process",
        "nvidia-smi",
        traceback(
            ("/w/train.py", "<module>", "torch.cuda.set_device(local_rank)"),
            (f"{PACKAGES}torch/cuda/__init__.py", "set_device", "torch._C._cuda_setDevice(device)"),
            error="torch.AcceleratorError: CUDA error: out of memory",
        ),
        says="no room for its context",
    ),
    Reported(
        "a data set that uses the GPU in workers",
        "not-pytorch",
        "create CPU tensors",
        traceback(
            (f"{PACKAGES}torch/utils/data/_utils/worker.py", "_worker_loop", "data = fetcher.fetch(index)"),
            ("/w/dataset.py", "__getitem__", "image = torch.tensor(values).cuda()"),
            error="RuntimeError: CUDA error: out of memory",
        ),
        says="each worker",
    ),
    Reported(
        "logits in float32",
        "true-need",
        "lowtide.fit(",
        traceback(
            ("/w/train.py", "main", "loss = model(**batch).loss"),
            (f"{PACKAGES}transformers/loss/loss_utils.py", "ForCausalLMLoss", "logits = logits.float()"),
            error=cuda("7.82 GiB", "79.15 GiB", "5.10 GiB", "74.00 GiB", "71.20 GiB", "1.90 GiB"),
        ),
        says=r"logits of 7\.82 GiB[\s\S]*chunked loss head",
        never="only the last straw",
    ),
    Reported(
        "the probabilities of a reward model's words",
        "true-need",
        "lowtide.fit(",
        traceback(
            (f"{PACKAGES}trl/trainer/grpo_trainer.py", "_get_logps", "logps = selective_log_softmax(logits, ids)"),
            (f"{PACKAGES}trl/trainer/utils.py", "selective_log_softmax", "rows = F.log_softmax(row, dim=-1)"),
            error=cuda("9.27 GiB", "79.25 GiB", "8.11 GiB", "71.13 GiB", "66.80 GiB", "3.41 GiB"),
        ),
        says=r"logits of 9\.27 GiB",
    ),
    Reported(
        "attention scores of all pairs",
        "true-need",
        "lowtide.fit(",
        traceback(
            ("/w/model.py", "attention", "p_attn = F.softmax(scores, dim=-1)"),
            error=cuda("2.00 GiB", "23.64 GiB", "1.10 GiB", "22.50 GiB", "21.10 GiB", "900.00 MiB"),
        ),
        says=r"attention scores of 2 GiB[\s\S]*scaled_dot_product_attention",
    ),
]
