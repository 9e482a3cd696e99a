# ruff: noqa: E501, RUF001  (messages stand as programs print them)
"""More kinds of output from reports: impossible sizes, places in other libraries, and programs with words of their own.

The amounts and names are made up.
"""

from diagnostics.oom.reported import Reported  # type: ignore[import-not-found]

REPORTED = [
    Reported(
        "1EB",
        "huge-tensor",
        "print the sizes and",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        says="overflow|negative|corrupt",
        never="fit\\(|expandable",
    ),
    Reported(
        "1EB npu",
        "huge-tensor",
        "print the sizes and",
        "RuntimeError: NPU out of memory. Tried to allocate more than 1EB memory.",
        says="overflow|negative|corrupt",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "cpu 2**64",
        "huge-tensor",
        "print the sizes and",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 18446744065119617024 bytes. Error code 12 (Cannot allocate memory)",
        says="overflow|negative",
        never="fit\\(",
    ),
    Reported(
        "mps other",
        "not-pytorch",
        "holds it: compiled graphs",
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: "
        "27.20 GiB). Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
        "upper limit for memory allocations (may cause system failure).",
        says="17\\.[34]",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "mps 256",
        "cap",
        "raise the limit if it is not",
        "RuntimeError: MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed: "
        "18.13 GB). Tried to allocate 256 bytes on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable "
        "upper limit for memory allocations (may cause system failure).",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "npu other",
        "other-process",
        "npu-smi",
        "RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB "
        "already allocated; 10.24 GiB current active; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch) If "
        "reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "own pid in container",
        "true-need",
        "lowtide.fit(model, step,",
        "[rank6]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 270.00 MiB. GPU 6 has a total capacity "
        "of 23.65 GiB of which 208.06 MiB is free. Process 2271801 has 23.44 GiB memory in use. Of the allocated memory "
        "22.87 GiB is allocated by PyTorch, and 6.23 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.",
        never="other process",
    ),
    Reported(
        "windows 4096",
        "host-memory",
        "enlarge the paging file",
        "RuntimeError: [enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough "
        "memory: you tried to allocate 4096 bytes.",
        says="paging|commit",
        never="fit\\(|max_map",
    ),
    Reported(
        "mmap weights",
        "host-memory",
        "fewer DataLoader workers, a",
        "RuntimeError: unable to mmap 9976634558 bytes from file </models/pytorch_model-00001-of-00002.bin>: Cannot "
        "allocate memory (12)",
        never="max_map_count",
    ),
    Reported(
        "jax 24",
        "other-process",
        "check nvidia-smi on the",
        "RuntimeError: Resource exhausted: Out of memory while trying to allocate 24 bytes.",
        says="preallocat|other process|another process",
        never="true-need|needs more memory",
    ),
    Reported(
        "mps ndarray",
        "cap",
        "make it in pieces: smaller",
        "/AppleInternal/Library/BuildRoots/9e200cfa/Library/Caches/com.apple.xbs/Sources/MetalPerformanceShaders/MPSCor"
        "e/Types/MPSNDArray.mm:850: failed assertion `[MPSNDArray initWithDevice:descriptor:] Error: total bytes of "
        "NDArray > 2**32'",
        says="4 GiB",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "fraction exact",
        "cap",
        "raise",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which 60.31 GiB is free. Process 17 has 18.83 GiB memory in use. 19.79 GiB allowed; Of the allocated "
        "memory 18.01 GiB is allocated by PyTorch, and 12.60 MiB is reserved by PyTorch but unallocated.",
    ),
    Reported(
        "alloc conf new name",
        "fragmentation",
        "expandable_segments:True",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 78.50 GiB memory in use. Of "
        "the allocated memory 60.00 GiB is allocated by PyTorch, and 17.60 GiB is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.",
    ),
    Reported(
        "foreach temp",
        "optimizer-temporaries",
        "foreach=False",
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in main\n    optimizer.step()\n  File '
        '"/opt/v/lib/python3.10/site-packages/torch/optim/adamw.py", line 606, in _multi_tensor_adamw\n    '
        "exp_avg_sq_sqrt = torch._foreach_sqrt(device_exp_avg_sqs)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 130.00 MiB. GPU 0 has a total capacity of 94.99 GiB of which 87.19 MiB is free. Including non-PyTorch "
        "memory, this process has 94.89 GiB memory in use. Of the allocated memory 93.10 GiB is allocated by PyTorch, "
        "and 900.00 MiB is reserved by PyTorch but unallocated.",
        says="optimizer",
    ),
    Reported(
        "rich foreach",
        "optimizer-temporaries",
        "fused",
        "│ C:\\kohya_ss\\venv\\lib\\site-packages\\torch\\optim\\adamw.py:566 in _multi_tensor_adamw               │\n│   565 │ "
        "  │   │   │   torch._foreach_div_(exp_avg_sq_sqrt, bias_correction2_sqrt)                │\n│ ❱ 566 │   │   │   "
        "│   denom = torch._foreach_add(exp_avg_sq_sqrt, eps)                           "
        "│\n╰──────────────────────────────────────────────────────────────────────────────────────────────────╯\nOutOfMe"
        "moryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.99 GiB total capacity;\n22.56 GiB already "
        "allocated; 0 bytes free; 23.05 GiB reserved in total by PyTorch)",
    ),
    Reported(
        "torch1 adam step state",
        "optimizer-first-step",
        "fused",
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in main\n    optimizer.step()\n  File '
        "\"/usr/lib/python3.7/site-packages/torch/optim/adam.py\", line 86, in step\n    state['exp_avg_sq'] = "
        "torch.zeros_like(p, memory_format=torch.preserve_format)\nRuntimeError: CUDA out of memory. Tried to allocate "
        "148.00 MiB (GPU 0; 10.76 GiB total capacity; 9.60 GiB already allocated; 50.56 MiB free; 9.87 GiB reserved in "
        "total by PyTorch)",
    ),
    Reported(
        "apex",
        "optimizer-first-step",
        "less state",
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in main\n    optimizer.step()\n  File '
        "\"/opt/conda/lib/python3.8/site-packages/apex/optimizers/fused_adam.py\", line 140, in step\n    state['exp_avg'] "
        "= torch.zeros_like(p.data)\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 39.59 GiB "
        "total capacity; 37.31 GiB already allocated; 1.03 GiB free; 37.80 GiB reserved in total by PyTorch)",
    ),
    Reported(
        "deepspeed init",
        "optimizer-first-step",
        "fused=True for the",
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in main\n    deepspeed.initialize()\n  '
        'File "/opt/conda/lib/python3.10/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line 519, in __init__\n '
        "   self.initialize_optimizer_states()\n  File "
        '"/opt/conda/lib/python3.10/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line 654, in '
        "initialize_optimizer_states\n    self.optimizer.step()\nRuntimeError: CUDA out of memory. Tried to allocate "
        "12.55 GiB (GPU 0; 79.35 GiB total capacity; 62.77 GiB already allocated; 11.77 GiB free; 65.30 GiB reserved in "
        "total by PyTorch)",
    ),
    Reported(
        "cat in prediction_loop",
        "evaluation-gathers",
        "preprocess_logits",
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in main\n    trainer.evaluate()\n  File '
        '"/home/mypc/.local/lib/python3.8/site-packages/transformers/trainer.py", line 1244, in prediction_loop\n    '
        "preds = logits if preds is None else torch.cat((preds, logits), dim=0)\nRuntimeError: CUDA out of memory. Tried "
        "to allocate 4.60 GiB (GPU 0; 23.65 GiB total capacity; 17.42 GiB already allocated; 3.92 GiB free; 18.31 GiB "
        "reserved in total by PyTorch)",
    ),
    Reported(
        "ipython eval",
        "evaluation-gathers",
        "preprocess_logits",
        "[/usr/local/lib/python3.10/dist-packages/transformers/trainer_pt_utils.py](https://localhost:8080/#) in "
        "torch_pad_and_concatenate(tensor1, tensor2, padding_index)\n     86 \n---> 88     result = "
        "tensor1.new_full(new_shape, padding_index)\n     89     result[: tensor1.shape[0], : tensor1.shape[1]] = "
        "tensor1\n\nOutOfMemoryError: CUDA out of memory. Tried to allocate 12.94 GiB (GPU 0; 39.56 GiB total capacity; "
        "18.33 GiB already allocated; 12.29 GiB free; 25.71 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory",
    ),
    Reported(
        "torchmetrics",
        "evaluation-gathers",
        "keep argmax or the metric",
        'Traceback (most recent call last):\n  File "/home/u/train.py", line 88, in main\n    trainer.validate(model)\n  '
        'File "/v/lib/python3.11/site-packages/torchmetrics/utilities/data.py", line 38, in dim_zero_cat\n    return '
        "torch.cat(x, dim=0)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total "
        "capacity of 23.64 GiB of which 31.81 MiB is free. Including non-PyTorch memory, this process has 23.60 GiB "
        "memory in use. Of the allocated memory 23.11 GiB is allocated by PyTorch, and 48.60 MiB is reserved by PyTorch "
        "but unallocated.",
    ),
    Reported(
        "own eval cat",
        "evaluation-gathers",
        "keep argmax or the metric",
        'Traceback (most recent call last):\n  File "train.py", line 140, in <module>\n    main()\n  File "train.py", line '
        "97, in evaluate\n    logits = torch.cat(all_logits)\nRuntimeError: CUDA out of memory. Tried to allocate 8.10 "
        "GiB (GPU 0; 15.90 GiB total capacity; 9.40 GiB already allocated; 5.20 GiB free; 9.60 GiB reserved in total by "
        "PyTorch)",
    ),
    Reported(
        "persistent_load",
        "loading",
        "map_location",
        'Traceback (most recent call last):\n  File "/home/ubuntu/lm/main.py", line 136, in load_model\n    '
        "optimizer.load_state_dict(torch.load(optimizer_path))\n  File "
        '"/home/ubuntu/env/lib/python3.6/site-packages/torch/serialization.py", line 99, in _cuda_deserialize\n    '
        "return storage_type(obj.size())\nRuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 11.17 "
        "GiB total capacity; 10.62 GiB already allocated; 17.19 MiB free; 10.70 GiB reserved in total by PyTorch)",
    ),
    Reported(
        "optimizer.load_state_dict",
        "loading",
        "map_location",
        'Traceback (most recent call last):\n  File "tools/run.py", line 83, in run\n    trainer.train()\n  File '
        '"/home/B/pythia/utils/checkpoint.py", line 242, in restore\n    '
        'self.trainer.optimizer.load_state_dict(ckpt["optimizer"])\n  File '
        '"/home/g/lib/python3.6/site-packages/torch/optim/optimizer.py", line 103, in load_state_dict\n    state_dict = '
        'deepcopy(state_dict)\n  File "/home/g/lib/python3.6/copy.py", line 150, in deepcopy\nRuntimeError: CUDA out of '
        "memory. Tried to allocate 39.12 MiB (GPU 0; 10.76 GiB total capacity; 9.71 GiB already allocated; 5.56 MiB "
        "free; 10.13 MiB cached)",
    ),
    Reported(
        "model.to",
        "loading",
        "weights in a smaller dtype",
        'Traceback (most recent call last):\n  File "train.py", line 40, in <module>\n    model.to("cuda")\n  File '
        '"/v/lib/python3.10/site-packages/torch/nn/modules/module.py", line 1143, in convert\n    return t.to(device, '
        "dtype if t.is_floating_point() or t.is_complex() else None, non_blocking)\nRuntimeError: CUDA out of memory. "
        "Tried to allocate 172.00 MiB (GPU 0; 23.69 GiB total capacity; 23.01 GiB already allocated; 45.00 MiB free; "
        "23.02 GiB reserved in total by PyTorch)",
        says="weights",
        never="fit\\(",
    ),
    Reported(
        "from_pretrained",
        "loading",
        "weights in a smaller dtype",
        'Traceback (most recent call last):\n  File "/usr/lib/python3.10/site-packages/accelerate/utils/modeling.py", '
        "line 400, in set_module_tensor_to_device\n    new_value = value.to(device)\nRuntimeError: NPU out of memory. "
        "Tried to allocate 386.00 MiB (NPU 2; 60.97 GiB total capacity; 59.57 GiB already allocated; 59.57 GiB current "
        "active; 16.54 MiB free; 60.06 GiB reserved in total by PyTorch)",
        says="weights",
        never="nvidia|torch\\.cuda|CUDA_|fit\\(",
    ),
    Reported(
        "pin deepspeed",
        "pinned-memory",
        "pin_memory",
        "Traceback (most recent call last):\n  File "
        '"/v/lib/python3.11/site-packages/deepspeed/runtime/zero/partition_parameters.py", line 1400, in '
        "_partition_param\n    partitioned_tensor = get_accelerator().pin_memory(partitioned_tensor)\n  File "
        '"/v/lib/python3.11/site-packages/deepspeed/accelerator/cuda_accelerator.py", line 217, in pin_memory\n    '
        "return tensor.pin_memory()\nRuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously "
        "reported at some other API call",
    ),
    Reported(
        "pin own",
        "pinned-memory",
        "pin less memory at once, or none",
        'Traceback (most recent call last):\n  File "cache.py", line 20, in __init__\n    self.buffer = torch.empty(n, '
        "d).pin_memory()\nRuntimeError: CUDA error: out of memory",
    ),
    Reported(
        "nccl calloc",
        "not-pytorch",
        "collective",
        "ng30903:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        says="NCCL",
    ),
    Reported(
        "nccl calloc async",
        "not-pytorch",
        "collective",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, "
        "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclUnhandledCudaError: Call "
        "to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 24 bytes",
        says="NCCL",
    ),
    Reported(
        "triton no shared",
        "cap",
        "block sizes",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nOutOfResources: out of resource: "
        "triton_mm, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
        never="fit\\(|nvidia-smi",
    ),
    Reported(
        "triton tmem",
        "cap",
        "block sizes",
        "triton.runtime.errors.OutOfResources: out of resource: tensor memory, Required: 640, Hardware limit: 512. "
        "Reducing block sizes or `num_stages` may help.",
        never="fit\\(|nvidia-smi",
    ),
    Reported(
        "triton place",
        "not-pytorch",
        "check nvidia-smi for",
        '  File "/v/site-packages/torch/_inductor/runtime/triton_heuristics.py", line 1036, in run\n    return '
        "launcher(\nRuntimeError: CUDA driver error: out of memory",
        says="Triton",
    ),
    Reported(
        "driver api",
        "not-pytorch",
        "check nvidia-smi for",
        "RuntimeError: CUDA driver error: out of memory",
        says="expandable segments",
        never="outside PyTorch's allocator",
    ),
    Reported(
        "open files of the program",
        "cap",
        "raise it: ulimit",
        "OSError: [Errno 24] Too many open files: 'shards/00417.npy'",
        says="files and sockets that are not closed",
    ),
    Reported(
        "eval forward",
        "true-need",
        "eval",
        'Traceback (most recent call last):\n  File "/v/lib/python3.11/site-packages/transformers/trainer.py", line '
        "4500, in prediction_step\n    loss, outputs = self.compute_loss(model, inputs, "
        "return_outputs=True)\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a "
        "total capacity of 23.64 GiB of which 31.81 MiB is free. Including non-PyTorch memory, this process has 23.60 "
        "GiB memory in use. Of the allocated memory 23.11 GiB is allocated by PyTorch, and 48.60 MiB is reserved by "
        "PyTorch but unallocated.",
    ),
    Reported(
        "vllm cache blocks",
        "cap",
        "gpu_memory_utilization",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
        says="vLLM",
        never="fit\\(",
    ),
    Reported(
        "vllm startup",
        "other-process",
        "nvidia-smi",
        "ValueError: Free memory on device (12.31/79.15 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.24 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        says="vLLM",
        never="fit\\(",
    ),
    Reported(
        "vllm kv",
        "cap",
        "max_model_len",
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (13.21 GiB). Based on the available memory, the "
        "estimated maximum model length is 108192. Try increasing `gpu_memory_utilization` or decreasing "
        "`max_model_len` when initializing the engine.",
        says="vLLM",
        never="fit\\(",
    ),
    Reported(
        "sglang",
        "cap",
        "mem-fraction",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        says="SGLang",
        never="fit\\(",
    ),
    Reported(
        "fairseq alone",
        "true-need",
        "max-tokens",
        "| WARNING: ran out of memory on GPU #2, skipping batch",
    ),
    Reported(
        "tal",
        "true-need",
        "batch",
        "WARNING ⚠️ CUDA OutOfMemoryError in TaskAlignedAssigner, using CPU",
        says="Ultralytics|YOLO",
    ),
    Reported(
        "comfy vae",
        "true-need",
        "til",
        "Warning: Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding.",
    ),
    Reported(
        "bnb",
        "not-pytorch",
        "under WSL, set more memory in",
        "Error out of memory at line 380 in file /home/u/bitsandbytes/csrc/pythonInterface.c",
        says="bitsandbytes",
        never="host-memory",
    ),
    Reported(
        "ds -9",
        "host-memory",
        "check dmesg | grep -i oom,",
        "[2024-07-01 10:11:12,315] [ERROR] [launch.py:321:sigkill_handler] ['/home/pc/bin/python', '-u', 'train.py'] "
        "exits with return code = -9",
        certain=False,
    ),
    Reported(
        "swarm",
        "host-memory",
        "check dmesg | grep -i oom,",
        '"Err": "task: non-zero exit (137)"',
        certain=False,
    ),
    Reported(
        "sagemaker",
        "host-memory",
        "an instance type with more",
        "UnexpectedStatusException: Error for Training job: Failed. Reason: ClientError: Please use an instance type "
        "with more memory, or reduce the size of training data processed on an instance.",
    ),
    Reported(
        "evicted",
        "host-memory",
        "request",
        "  Warning  Evicted  4m  kubelet  The node was low on resource: memory. Threshold quantity: 100Mi, available: "
        "88Mi. Container main was using 60Gi, request is 0, has larger consumption of memory.",
        says="node|Kubernetes",
    ),
    Reported(
        "kernel for",
        "host-memory",
        "watch RAM while it runs",
        "The kernel for train.ipynb appears to have died. It will restart automatically.",
        certain=False,
    ),
    Reported(
        "spyder",
        "host-memory",
        "watch RAM while it runs",
        "Kernel died, restarting",
        certain=False,
    ),
    Reported(
        "databricks",
        "host-memory",
        "watch RAM while it runs",
        "Fatal error: The Python kernel is unresponsive.",
        certain=False,
    ),
    Reported(
        "oomd",
        "host-memory",
        "add memory or swap, or",
        "systemd-oomd[812]: Killed /user.slice/user-1000.slice/user@1000.service/app.slice/python.scope due to memory "
        "pressure for /user.slice being 71.45% > 50.00% for > 20s with reclaim activity",
        never="Ray",
    ),
    Reported(
        "systemd",
        "host-memory",
        "look in dmesg for the process and",
        "systemd[1]: train.service: A process of this unit has been killed by the OOM killer.",
    ),
    Reported(
        "earlyoom",
        "host-memory",
        "add memory or swap, or",
        'earlyoom[731]: sending SIGTERM to process 28471 uid 1000 "python": badness 803, VmRSS 31213 MiB',
    ),
    Reported(
        "kernel log",
        "host-memory",
        "look in dmesg for the process and",
        "kernel: Out of memory: Killed process 2311 (python) total-vm:91234512kB, anon-rss:62914560kB, file-rss:0kB, "
        "shmem-rss:0kB, UID:1000",
        says="60 GiB",
    ),
    Reported(
        "dll paging",
        "host-memory",
        "paging",
        "ImportError: DLL load failed while importing _C: The paging file is too small for this operation to complete.",
    ),
    Reported(
        "dll zh",
        "host-memory",
        "paging",
        "ImportError: DLL load failed while importing _multiarray_umath: 页面文件太小，无法完成操作。",
    ),
    Reported(
        "dll fr",
        "host-memory",
        "paging",
        "OSError: [WinError 1455] Le fichier de pagination est insuffisant pour terminer cette opération. Error loading "
        '"C:\\t\\torch_cuda.dll"',
    ),
    Reported(
        "winerror 8",
        "host-memory",
        "enlarge the paging file",
        "OSError: [WinError 8] Not enough memory resources are available to process this command",
    ),
    Reported(
        "errno28 disk",
        "cap",
        "check df -h (and df -i) of",
        "OSError: [Errno 28] No space left on device: '/root/.cache/huggingface/hub/tmp123'",
        says="disk|df",
    ),
    Reported(
        "rmm",
        "not-pytorch",
        "check nvidia-smi for",
        "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: "
        "/opt/conda/include/rmm/mr/device/cuda_memory_resource.hpp:70: cudaErrorMemoryAllocation out of memory",
        never="main memory is used up",
    ),
    Reported(
        "tcnn",
        "not-pytorch",
        "check nvidia-smi for",
        "RuntimeError: /tiny-cuda-nn/include/tiny-cuda-nn/gpu_memory.h:590 cudaMalloc(&rawptr, "
        "n_bytes+DEBUG_GUARD_SIZE*2) failed: out of memory",
    ),
    Reported(
        "trt",
        "not-pytorch",
        "a smaller workspace (memory",
        "[TRT] [E] 1: [defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of memory)",
        says="TensorRT",
    ),
    Reported(
        "trt2",
        "not-pytorch",
        "a smaller workspace (memory",
        "[E] Error[2]: [virtualMemoryBuffer.cpp::resizePhysical::127] Error Code 2: OutOfMemory (no further "
        "information)",
        says="TensorRT",
    ),
    Reported(
        "ort",
        "true-need",
        "smaller inputs, or",
        "onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException: [ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : "
        "Non-zero status code returned while running Mul node. Status Message: "
        "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:368 void* "
        "onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Failed to allocate memory for "
        "requested buffer of size 2830172160",
        says="ONNX|2\\.64",
    ),
    Reported(
        "ggml",
        "true-need",
        "fewer layers on the GPU",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 144.00 MiB on device 4: cudaMalloc failed: out of "
        "memory",
        says="144 MiB",
        never="fit\\(",
    ),
    Reported(
        "tf bfc",
        "true-need",
        "smaller batches, shorter",
        "W tensorflow/core/common_runtime/bfc_allocator.cc:479] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 560.44MiB (rounded to 587661312)requested by op _EagerConst",
        says="560 MiB",
        never="fit\\(|torch\\.cuda",
    ),
    Reported(
        "tf driver",
        "other-process",
        "check nvidia-smi for",
        "E tensorflow/stream_executor/cuda/cuda_driver.cc:924] failed to allocate 10.27G (11026489344 bytes) from "
        "device: CUDA_ERROR_OUT_OF_MEMORY",
        never="PyTorch's allocator|torch\\.cuda",
    ),
    Reported(
        "jax huge",
        "huge-tensor",
        "find the operation that allocates it: logits",
        "W external/xla/xla/tsl/framework/bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 1.25TiB (rounded to 1374521760000)requested by op",
        says="1.25 TiB",
    ),
    Reported(
        "jax tpu",
        "true-need",
        "smaller batches, shorter",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory "
        "in memory space hbm. Used 20.21G of 15.75G hbm. Exceeded hbm capacity by 4.46G.",
        says="15.8 GiB",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "mlx",
        "cap",
        "make the array in pieces:",
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: [metal::malloc] Attempting to "
        "allocate 22100000000 bytes which is greater than the maximum allowed buffer size of 17179869184 bytes.",
        says="20.6 GiB",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "cudnn9",
        "not-pytorch",
        "check nvidia-smi for",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ),
    Reported(
        "cudnn9 host",
        "host-memory",
        "fewer DataLoader workers, a",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    ),
    Reported(
        "cusparse",
        "not-pytorch",
        "check nvidia-smi for",
        "RuntimeError: CUDA error: insufficient resources when calling `cusparseSpGEMM_workEstimation(...)`",
    ),
    Reported(
        "ipex device",
        "true-need",
        "lowtide.fit(model, step,",
        "RuntimeError: Allocation is out of device memory on current platform.",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "ur40",
        "not-pytorch",
        "xpu-smi",
        "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "pi host",
        "not-pytorch",
        "check xpu-smi ps for",
        "RuntimeError: Native API failed. Native API returns: -6 (PI_ERROR_OUT_OF_HOST_MEMORY) -6 "
        "(PI_ERROR_OUT_OF_HOST_MEMORY)",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "hsa",
        "not-pytorch",
        "rocm-smi",
        "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. This error may also "
        "occur when the core runtime library needs to spawn threads or create internal OS-specific events. Code: 0x1008",
        never="nvidia",
    ),
    Reported(
        "acl",
        "not-pytorch",
        "npu-smi",
        "[ERROR] EL0004: Failed to allocate memory. Possible Cause: Available memory is insufficient. Solution: Close "
        "applications not in use.",
        never="nvidia|torch\\.cuda|CUDA_",
    ),
    Reported(
        "dask",
        "host-memory",
        "smaller partitions, or",
        "distributed.nanny.memory - WARNING - Worker tcp://127.0.0.1:41234 (pid=123) exceeded 95% memory budget. "
        "Restarting...",
        says="Dask",
    ),
    Reported(
        "condor hold",
        "host-memory",
        "request_memory",
        "Job was held. Code 34 Subcode 0 memory usage exceeded request_memory",
    ),
    Reported(
        "cc1plus",
        "host-memory",
        "MAX_JOBS=2 before pip",
        "c++: fatal error: Killed signal terminated program cc1plus\nninja: build stopped: subcommand failed.",
        says="MAX_JOBS",
    ),
    Reported(
        "cupy",
        "true-need",
        "smaller arrays or dtypes",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 4,294,967,296 bytes (allocated so far: "
        "5,368,709,120 bytes).",
        says="4 GiB",
        never="fit\\(|set_per_process",
    ),
    Reported(
        "ranks srun label",
        "true-need",
        "lowtide.fit(model, step,",
        "0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 GiB memory in use. Of "
        "the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
        "unallocated.\n1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a total "
        "capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 60.00 GiB "
        "memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is allocated by "
        "PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks mpirun",
        "true-need",
        "lowtide.fit(model, step,",
        "[1,0]<stderr>:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total "
        "capacity of 79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 GiB "
        "memory in use. Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch "
        "but unallocated.\n[1,3]<stderr>:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 "
        "has a total capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has "
        "60.00 GiB memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is "
        "allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks ray",
        "true-need",
        "lowtide.fit(model, step,",
        "(RayTrainWorker pid=123, ip=10.0.0.1) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. "
        "GPU 0 has a total capacity of 79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this "
        "process has 78.40 GiB memory in use. Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB "
        "is reserved by PyTorch but unallocated.\n(RayTrainWorker pid=456, ip=10.0.0.2) torch.OutOfMemoryError: CUDA out "
        "of memory. Tried to allocate 1.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 600.00 MiB is free. "
        "Including non-PyTorch memory, this process has 60.00 GiB memory in use. Process 9911 has 18.40 GiB memory in "
        "use. Of the allocated memory 57.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
        "unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks torchrun dflt",
        "true-need",
        "lowtide.fit(model, step,",
        "[default0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity "
        "of 79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 GiB memory in "
        "use. Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
        "unallocated.\n[default3]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a "
        "total capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 60.00 "
        "GiB memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is allocated by "
        "PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks kubectl",
        "true-need",
        "lowtide.fit(model, step,",
        "[pod/train-worker-0/pytorch] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has "
        "a total capacity of 79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has "
        "78.40 GiB memory in use. Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved "
        "by PyTorch but unallocated.\n[pod/train-worker-1/pytorch] torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 1.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch "
        "memory, this process has 60.00 GiB memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated "
        "memory 57.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks compose",
        "true-need",
        "lowtide.fit(model, step,",
        "worker-0  | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity "
        "of 79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 GiB memory in "
        "use. Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
        "unallocated.\nworker-1  | torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a "
        "total capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 60.00 "
        "GiB memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is allocated by "
        "PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks deepspeed hosts",
        "true-need",
        "lowtide.fit(model, step,",
        "worker-1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity "
        "of 79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 GiB memory in "
        "use. Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
        "unallocated.\nworker-2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a "
        "total capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 60.00 "
        "GiB memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is allocated by "
        "PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks accelerate/tee",
        "true-need",
        "lowtide.fit(model, step,",
        "[0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 GiB memory in use. "
        "Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
        "unallocated.\n[1]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a total "
        "capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 60.00 GiB "
        "memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is allocated by "
        "PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    Reported(
        "ranks Rank",
        "true-need",
        "lowtide.fit(model, step,",
        "[Rank 0] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB of which 700.00 MiB is free. Including non-PyTorch memory, this process has 78.40 GiB memory in use. "
        "Of the allocated memory 75.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by PyTorch but "
        "unallocated.\n[Rank 1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 1 has a "
        "total capacity of 79.15 GiB of which 600.00 MiB is free. Including non-PyTorch memory, this process has 60.00 "
        "GiB memory in use. Process 9911 has 18.40 GiB memory in use. Of the allocated memory 57.10 GiB is allocated by "
        "PyTorch, and 1.02 GiB is reserved by PyTorch but unallocated.",
        says="(?s)true-need.*other-process|other-process.*true-need",
    ),
    # --- ends without words of their own
    Reported(
        "a fork of subprocess",
        "host-memory",
        "check free -h and the container's limit",
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 14, in commit\n    return subprocess.check_output(["git", "rev-parse", "HEAD"])\n'
        '  File "/usr/lib/python3.11/subprocess.py", line 1885, in _execute_child\n'
        "    self.pid = _fork_exec(\n               ^^^^^^^^^^^\nOSError: [Errno 12] Cannot allocate memory",
        says="overcommit_memory",
        never="ulimit -v",
    ),
    Reported(
        "docker inspect",
        "host-memory",
        "raise the limit: docker run --memory",
        '"State": {\n  "Status": "exited",\n  "Running": false,\n  "OOMKilled": true,\n  "Dead": false,\n  "ExitCode": 137,',
        never="kubectl|not always",
    ),
    Reported(
        "a runner of GitHub that was shut down",
        "host-memory",
        "print the memory while the job runs",
        "##[error]The runner has received a shutdown signal. This can happen when the runner service is stopped, or a "
        "manually started runner is canceled.\n##[error]Process completed with exit code 137.",
        never="kubectl",
        certain=False,
    ),
    Reported(
        "Grid Engine's mail",
        "host-memory",
        "request more: qsub -l h_vmem",
        "failed assumedly after job because:\njob 912345.1 died through signal KILL (9)",
        certain=False,
    ),
    Reported(
        "TensorRT-LLM without arguments",
        "true-need",
        "free_gpu_memory_fraction",
        "[TensorRT-LLM][ERROR] CUDA runtime error in cudaMallocAsync: out of memory (tllmBuffers.h:211)",
        never=r"fit\(",
    ),
    Reported(
        "a container of a service",
        "host-memory",
        "use a larger memory size",
        "Runner terminated: Container exceeded its memory limit of 8192 MiB (OOM).",
    ),
    Reported(
        "the kernel of WSL",
        "host-memory",
        "set memory=24GB and swap=16GB under",
        "[  812.1] python invoked oom-killer: gfp_mask=0x140dca(GFP_HIGHUSER_MOVABLE|__GFP_COMP|__GFP_ZERO), order=0, "
        "oom_score_adj=0\n[  812.1] CPU: 4 PID: 812 Comm: python Not tainted 5.15.167.4-microsoft-standard-WSL2 #1\n"
        "[  812.3] Out of memory: Killed process 812 (python) total-vm:41234567kB, anon-rss:15123456kB, file-rss:0kB, "
        "shmem-rss:0kB, UID:1000 pgtables:31212kB oom_score_adj:0",
    ),
    Reported(
        "a small request that Linux refuses",
        "host-memory",
        "use fewer DataLoader workers",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 1048576 bytes. Error code 12 (Cannot allocate memory)",
        says="check ulimit -v and vm.overcommit_memory",
    ),
    Reported(
        "a service in words of its own",
        "host-memory",
        "use a larger memory size",
        "Your Studio ran out of RAM and was restarted.",
    ),
    Reported(
        "a launch by Triton beyond the GPU's registers",
        "cap",
        "",
        "RuntimeError: Triton Error [CUDA]: too many resources requested for launch",
        never=r"fit\(|nvidia-smi",
    ),
]
