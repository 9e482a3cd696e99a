# ruff: noqa: E501  (messages stand as programs print them)
"""Kinds of output of programs that run or wrap models, of services, and of places that a traceback names.

The amounts and names are made up.
"""

from diagnostics.oom.reported import Reported, cuda  # type: ignore[import-not-found]

PACKAGES = "/opt/v/lib/python3.11/site-packages/"
FULL = cuda("128.00 MiB", "23.64 GiB", "61.81 MiB", "23.50 GiB", "22.98 GiB", "71.60 MiB")
ROOM_FOR_LESS = cuda("1.91 GiB", "23.64 GiB", "1.20 GiB", "22.44 GiB", "21.50 GiB", "400.00 MiB")


def traceback(*frames: tuple[str, str, str], error: str = FULL) -> str:
    """Return a traceback of files, functions and statements that ends in `error`."""
    lines = (f'  File "{file}", line {61 + n}, in {name}\n    {code}\n' for n, (file, name, code) in enumerate(frames))
    return "Traceback (most recent call last):\n" + "".join(lines) + error


REPORTED = [
    # --- models that are run, not trained
    Reported(
        "vLLM's sampler",
        "true-need",
        "fewer max_num_seqs",
        "(VllmWorker rank=3 pid=9012) ERROR 04-02 11:20:41 [multiproc_executor.py:375] RuntimeError: CUDA out of memory "
        "occurred when warming up sampler with 512 dummy requests. Please try lowering `max_num_seqs` or "
        "`gpu_memory_utilization` when initializing the engine.",
        never=r"fit\(|accumulate",
    ),
    Reported(
        "vLLM's weights, in its log",
        "true-need",
        "max_model_len",
        "\n".join(
            f"(EngineCore_DP0 pid=311) ERROR 11-19 12:16:36 [core.py:842] {line}"
            for line in traceback(
                ("/x/vllm/v1/worker/gpu_worker.py", "load_model", "self.model_runner.load_model()"),
                (PACKAGES + "vllm/model_executor/layers/linear.py", "create_weights", "weight = torch.empty("),
            ).splitlines()
        ),
        says="tensor_parallel_size",
        never=r"fit\(|accumulate|lowtide watch",
    ),
    Reported(
        "vLLM's cache, in older words",
        "cap",
        "max_model_len within",
        "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV "
        "cache (21920). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    ),
    Reported(
        "SGLang's graphs",
        "true-need",
        "mem-fraction-static",
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total "
        "capacity of 79.15 GiB of which 41.56 MiB is free. Process 12 has 79.10 GiB memory in use. Of the allocated "
        "memory 76.91 GiB is allocated by PyTorch, with 300.12 MiB allocated in private pools (e.g., CUDA Graphs), and "
        "120.01 MiB is reserved by PyTorch but unallocated.",
        says="running the model",
        never=r"fit\(|accumulate|lowtide watch",
    ),
    Reported(
        "SGLang's start",
        "other-process",
        "nvidia-smi",
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
        "pre_model_load_memory=78.1, local_gpu_memory=20.2, local_gpu_memory * 0.9=18.18",
        never=r"fit\(",
    ),
    Reported(
        "ComfyUI without numbers",
        "true-need",
        "tiled VAE",
        'File "C:\\ComfyUI\\comfy\\ldm\\modules\\attention.py", line 63, in forward\n    x, gate = self.proj(x)\n'
        "torch.OutOfMemoryError: Allocation on device \n\nGot an OOM, unloading all loaded models.",
        never=r"fit\(|accumulate",
    ),
    Reported(
        "Stable Diffusion's web UI",
        "true-need",
        "--xformers",
        "RuntimeError: Not enough memory, use lower resolution (max approx. 768x768). Need: 3.1GB free, Have:2.2GB free",
        never=r"fit\(",
    ),
    Reported(
        "a generation's cache",
        "true-need",
        "max_new_tokens",
        traceback(
            ("/home/u/chat.py", "main", "out = model.generate(**inputs)"),
            (PACKAGES + "torch/utils/_contextlib.py", "decorate_context", "return func(*args, **kwargs)"),
            (PACKAGES + "transformers/generation/utils.py", "_sample", "outputs = self(**model_inputs)"),
            (PACKAGES + "transformers/cache_utils.py", "update", "self.keys = torch.cat([self.keys, key_states])"),
        ),
        says="running the model",
        never=r"fit\(|accumulate|lowtide watch",
    ),
    Reported(
        "a generation inside a training step",
        "true-need",
        "lowtide.fit(",
        traceback(
            (PACKAGES + "trl/trainer/online_dpo_trainer.py", "training_step", "self._generate(model, prompts)"),
            (PACKAGES + "transformers/generation/utils.py", "_sample", "outputs = self(**model_inputs)"),
        ),
    ),
    Reported(
        "an image of diffusers",
        "true-need",
        "enable_model_cpu_offload",
        traceback(
            ("/home/u/draw.py", "main", "image = pipe(prompt).images[0]"),
            (PACKAGES + "diffusers/pipelines/flux/pipeline_flux.py", "__call__", "image = self.vae.decode(latents)"),
            (PACKAGES + "torch/nn/modules/conv.py", "_conv_forward", "return F.conv2d("),
        ),
        never=r"fit\(|accumulate",
    ),
    Reported(
        "a model that is run, and another process",
        "other-process",
        "check process 4711",
        traceback(
            (PACKAGES + "transformers/generation/utils.py", "_sample", "outputs = self(**model_inputs)"),
            error="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of "
            "23.64 GiB of which 61.81 MiB is free. Process 4711 has 15.20 GiB memory in use. Including non-PyTorch "
            "memory, this process has 8.37 GiB memory in use. Of the allocated memory 7.80 GiB is allocated by PyTorch, "
            "and 71.60 MiB is reserved by PyTorch but unallocated.",
        ),
    ),
    Reported(
        "llama.cpp's scratch memory",
        "true-need",
        "fewer layers on the GPU",
        "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 9332334592\n"
        "graph_reserve: failed to allocate compute buffers",
        never=r"fit\(",
    ),
    Reported(
        "llama.cpp's weights",
        "true-need",
        "fewer layers on the GPU",
        "llama_model_load: error loading model: unable to allocate ROCm0 buffer",
    ),
    Reported(
        "llama.cpp's pool of addresses",
        "true-need",
        "fewer layers on the GPU",
        "CUDA error: out of memory\n  current device: 0, in function alloc at /src/ggml/src/ggml-cuda/ggml-cuda.cu:418\n"
        "  cuMemCreate(&handle, reserve_size, &prop, 0)",
        never=r"fit\(|nvidia-smi which processes hold the device",
    ),
    Reported(
        "llama.cpp on the host",
        "host-memory",
        "more layers on the GPU",
        "ggml_aligned_malloc: insufficient memory (attempted to allocate 8192.25 MB)\n"
        "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 8590197008",
        never="nvidia",
    ),
    Reported(
        "llama.cpp's pinned memory",
        "pinned-memory",
        "locked memory",
        "ggml_cuda_host_malloc: failed to allocate 2900.00 MiB of pinned memory: out of memory",
        never=r"DataLoader|fit\(",
    ),
    Reported(
        "llama.cpp's pool",
        "cap",
        "a newer llama.cpp",
        "ggml_new_object: not enough space in the context's memory pool (needed 402653184, available 268435456)",
    ),
    Reported(
        "llama.cpp on Metal",
        "true-need",
        "quantized",
        "ggml_metal_graph_compute: command buffer 0 failed with status 5\n"
        "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        says="iogpu",
        never=r"nvidia|torch\.|PyTorch",
    ),
    Reported(
        "MLX's commands",
        "true-need",
        "quantized",
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command buffer execution "
        "failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        never=r"nvidia|torch\.|PyTorch",
    ),
    Reported(
        "MLX's memory",
        "true-need",
        "quantized",
        "RuntimeError: [malloc_or_wait] Unable to allocate 30064771072 bytes.",
        never=r"nvidia|torch\.",
    ),
    Reported(
        "a command of MPS",
        "not-pytorch",
        "Activity Monitor",
        "Error: command buffer exited with error status.\n\tThe Metal Performance Shaders operations encoded on it may "
        "not have completed.\n\tError:\n\t(null)\n\tInsufficient Memory "
        "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        says="WATERMARK_RATIO=0.9",
        never=r"RATIO\(|nvidia",
    ),
    Reported(
        "ExLlama", "true-need", "max_seq_len", "RuntimeError: Insufficient VRAM for model and cache", never=r"fit\("
    ),
    Reported(
        "faster-whisper", "true-need", "int8", "RuntimeError: CUDA failed with error out of memory", never=r"fit\("
    ),
    Reported(
        "ONNX Runtime's driver",
        "true-need",
        "smaller inputs",
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : CUDA failure 2: out of memory ; GPU=0 ; hostname=box ; "
        "expr=cudaMalloc((void**)&p, size);",
        never=r"fit\(",
    ),
    Reported(
        "OpenCV's matrices",
        "not-pytorch",
        "GpuMat",
        "cv2.error: OpenCV(4.9.0) /io/opencv/modules/core/src/cuda/gpu_mat.cu:121: error: (-217:Gpu API call) out of "
        "memory in function 'allocate'",
    ),
    Reported(
        "a device map",
        "loading",
        "free the GPU first",
        "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the "
        "quantized model. If you want to dispatch the model on the CPU or the disk while keeping these modules in 32-bit, "
        "you need to set `llm_int8_enable_fp32_cpu_offload=True`",
        never=r"fit\(",
    ),
    # --- by place
    Reported(
        "a whole state dict of FSDP",
        "model-copy",
        "offload_to_cpu=True",
        traceback(
            (PACKAGES + "torch/distributed/fsdp/_state_dict_utils.py", "_full_pre_state_dict_hook", "_common_unshard("),
            (
                PACKAGES + "torch/distributed/fsdp/_flat_param.py",
                "_all_gather_flat_param",
                "dist.all_gather_into_tensor(",
            ),
            error=ROOM_FOR_LESS,
        ),
        never=r"fit\(|NCCL",
    ),
    Reported(
        "a copy of the best weights",
        "model-copy",
        "keep the copy on the CPU",
        traceback(
            ("/home/u/train.py", "main", "best = copy.deepcopy(model.state_dict())"),
            ("/usr/lib/python3.11/copy.py", "deepcopy", "y = copier(x, memo)"),
            (PACKAGES + "torch/_tensor.py", "__deepcopy__", "new_storage = self._typed_storage()._deepcopy(memo)"),
        ),
        never=r"fit\(",
    ),
    Reported(
        "buckets of DistributedDataParallel",
        "engine-buffers",
        "gradient_as_bucket_view=True",
        traceback(
            ("/home/u/train.py", "main", "model = DDP(model)"),
            (PACKAGES + "torch/nn/parallel/distributed.py", "_ddp_init_helper", "self.reducer = dist.Reducer("),
            error=cuda("6.90 GiB", "23.64 GiB", "5.20 GiB", "18.30 GiB", "14.00 GiB", "3.00 GiB"),
        ),
        never=r"logits|fit\(",
    ),
    Reported(
        "DeepSpeed's float32 copies",
        "engine-buffers",
        "shard the copies",
        traceback(
            (PACKAGES + "deepspeed/runtime/zero/stage3.py", "_create_fp32_partitions", "float().detach()"),
            error=cuda("3.30 GiB", "23.64 GiB", "2.20 GiB", "21.40 GiB", "20.00 GiB", "1.00 GiB"),
        ),
        says="float32 copies",
        never=r"fit\(|outside PyTorch's allocator",
    ),
    Reported(
        "no room for a context",
        "other-process",
        "check nvidia-smi",
        traceback(
            (PACKAGES + "torch/cuda/__init__.py", "_lazy_init", "torch._C._cuda_init()"),
            error="RuntimeError: CUDA error: out of memory",
        ),
        never=r"fit\(",
    ),
    # --- host memory, limits, services
    Reported("a fork of a shell", "host-memory", "free -h", "bash: fork: Cannot allocate memory", never="nvidia"),
    Reported("no more processes", "cap", "fewer threads", "bash: fork: retry: Resource temporarily unavailable"),
    Reported("no more threads", "cap", "fewer threads", "RuntimeError: can't start new thread", never=r"fit\("),
    Reported(
        "threads of OpenBLAS",
        "cap",
        "fewer threads",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable",
    ),
    Reported(
        "a launch beyond the limits",
        "cap",
        "find the operator",
        "RuntimeError: CUDA error: invalid configuration argument\nCUDA kernel errors might be asynchronously reported",
        says="memory is not what ran out",
        never=r"lowtide\.fit|nvidia-smi",
    ),
    Reported(
        "TensorFlow on the CPU",
        "host-memory",
        "tf.data",
        "ResourceExhaustedError: OOM when allocating tensor with shape[60000,224,224,3] and type float on "
        "/job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu",
        never="nvidia",
    ),
    Reported(
        "TensorFlow, ended",
        "host-memory",
        "tf.data",
        "W tensorflow/tsl/framework/cpu_allocator_impl.cc:83] Allocation of 17198850112 exceeds 10% of free system memory."
        "\nKilled",
        never="nvidia",
    ),
    Reported(
        "a worker of datasets",
        "host-memory",
        "num_proc",
        "RuntimeError: One of the subprocesses has abruptly died during map operation.To debug the error, disable "
        "multiprocessing.",
        certain=False,
    ),
    Reported(
        "a worker of joblib",
        "host-memory",
        "n_jobs",
        "joblib.externals.loky.process_executor.TerminatedWorkerError: A worker process managed by the executor was "
        "unexpectedly terminated. This could be caused by a segmentation fault while calling the function or by an "
        "excessive memory usage causing the Operating System to kill the worker.",
        certain=False,
    ),
    Reported(
        "a worker of gunicorn",
        "host-memory",
        "one worker",
        "[2026-01-05 10:11:12 +0000] [1] [ERROR] Worker (pid:28) was sent SIGKILL! Perhaps out of memory?",
        certain=False,
    ),
    Reported("Arrow", "host-memory", "check free", "pyarrow.lib.ArrowMemoryError: malloc of size 17179869184 failed"),
    Reported(
        "Vertex AI",
        "host-memory",
        "a larger memory size",
        "The replica workerpool0-0 ran out-of-memory and exited with a non-zero status of 137(SIGKILL).",
    ),
    Reported(
        "Cloud Run",
        "host-memory",
        "a larger memory size",
        "Memory limit of 2048 MiB exceeded with 2101 MiB used. Consider increasing the memory limit",
    ),
    Reported(
        "a function of Lambda",
        "host-memory",
        "a larger memory size",
        "REPORT RequestId: 1-2 Duration: 4000 ms Memory Size: 3008 MB Max Memory Used: 3008 MB",
    ),
    Reported(
        "a space of Hugging Face", "host-memory", "a larger", "Exit code: ?. Reason: Memory limit exceeded (16Gi)"
    ),
    Reported(
        "a bus error of a worker",
        "cap",
        "shm-size",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ),
    Reported("a bus error alone", "cap", "shm-size", "Bus error (core dumped)", certain=False),
    Reported(
        "shared memory before torch 1.5",
        "cap",
        "shm-size",
        "RuntimeError: unable to write to file </torch_18692_1954506624>",
    ),
    Reported(
        "memory that could not be registered",
        "pinned-memory",
        "pin less memory at once, or",
        "cudaHostRegister failed: out of memory (size=68719476736)",
        says="vm.max_map_count",
        never="nvidia-smi",
    ),
    Reported(
        "memory that could not be registered, on ROCm",
        "pinned-memory",
        "pin less memory at once, or",
        "HIP error: hipHostRegister failed with hipErrorOutOfMemory at pinned_pool.cpp:88",
    ),
    Reported(
        "memory that could not be registered, by its line",
        "pinned-memory",
        "pin less memory at once, or",
        'Traceback (most recent call last):\n  File "/w/swap.py", line 91, in pin\n    torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))\ntorch.cuda.CudaError: out of memory (2)',
    ),
    Reported(
        "pinned memory of TensorFlow",
        "pinned-memory",
        "pin less memory at once, or",
        "W tensorflow/core/common_runtime/device/device_host_allocator.h:46] could not allocate pinned host memory of size: 34359738368\nE tensorflow/stream_executor/cuda/cuda_driver.cc:802] failed to alloc 34359738368 bytes on host: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ),
    Reported(
        "memory.events of a control group",
        "host-memory",
        "raise the group's limit",
        "$ cat /sys/fs/cgroup/memory.events\nlow 0\nhigh 0\nmax 18231\noom 4\noom_kill 1\noom_group_kill 0",
        says="memory\\.max",
    ),
    Reported(
        "a Python worker of Spark",
        "host-memory",
        "a larger spark.executor.memoryOverhead, or",
        "Lost task 3.3 in stage 7.0 (TID 91) (10.0.3.7 executor 4): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\nCaused by: java.io.EOFException",
        certain=False,
    ),
    Reported(
        "an executor of Spark on YARN",
        "host-memory",
        "a larger spark.executor.memoryOverhead, or",
        "ExecutorLostFailure (executor 5 exited caused by one of the running tasks) Reason: Container from a bad node: container_e04_1 on host: n12. Exit status: 137. Diagnostics: Container killed on request. Exit code is 137",
        certain=False,
    ),
    Reported(
        "buffers of RDMA",
        "cap",
        "raise it: ulimit -l",
        "node3:7:41 [2] transport/net_ib.cc:1120 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    ),
    Reported(
        "a host that ends containers",
        "host-memory",
        "look in dmesg for the process",
        "container was OOM killed, consider raising its memory",
    ),
    Reported(
        "the Trainer's gathering, cut off above nested_concat",
        "evaluation-gathers",
        "keep argmax or the metric of each",
        '  File "/usr/lib/python3.11/site-packages/transformers/trainer_pt_utils.py", line 312, in add\n    self.tensors = nested_concat(self.tensors, tensors, padding_index=self.padding_index)\n'
        + FULL,
    ),
]
