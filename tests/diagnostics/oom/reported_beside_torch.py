# ruff: noqa: E501  (messages stand as programs print them)
"""Output of programs beside PyTorch and of places in frameworks, in the words of public reports.

The amounts and names are made up.
"""

from diagnostics.oom.reported import Reported  # type: ignore[import-not-found]

REPORTED = [
    Reported(
        "llama.cpp's compute buffer of 255 GiB",
        "true-need",
        "fewer layers on the GPU",
        "llama_new_context_with_model: KV self size  = 1005.79 MiB, c^KV (f16): 1005.79 MiB, kv^T (f16):    0.00 MiB\n"
        "llama_new_context_with_model:  CUDA_Host  output buffer size =     0.99 MiB\n"
        "llama_new_context_with_model: pipeline parallelism enabled (n_copies=4)\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 261034.12 MiB on device 0: cudaMalloc failed: out of memory\n"
        "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 273714118656\n"
        "llama_new_context_with_model: failed to allocate compute buffers\n",
        says="--ubatch-size",
        never="fit\\(|Killed",
    ),
    Reported(
        "llama.cpp on ROCm",
        "true-need",
        "a shorter context",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 13136.04 MiB on device 0: cudaMalloc failed: out of memory\n"
        "ggml_gallocr_reserve_n: failed to allocate ROCm0 buffer of size 13774135296\n"
        "graph_reserve: failed to allocate compute buffers\n"
        "llama_init_from_model: failed to initialize the context: failed to allocate compute pp buffers\n"
        "common_init_from_params: failed to create context with model 'models/a-70B-IQ4_XS.gguf', try reducing --n-gpu-layers if you're running out of VRAM\n"
        "srv    load_model: failed to load model, 'models/a-70B-IQ4_XS.gguf'\n"
        "main: exiting due to model loading error\n",
        never="fit\\(|torch\\.cuda",
    ),
    Reported(
        "llama.cpp of 2023",
        "true-need",
        "fewer layers on the GPU",
        "main: build = 1233 (98311c4)\n"
        "main: seed  = 1694898033\n"
        "\n"
        "CUDA error 2 at /data/llama.cpp/ggml-cuda.cu:5509: out of memory\n"
        "current device: 1\n",
        never="fit\\(",
    ),
    Reported(
        "Ollama's runner",
        "true-need",
        "a smaller num_ctx",
        "Error: llama runner process has terminated: CUDA error: out of memory\n",
        says="ollama ps",
        never="fit\\(|PyTorch",
    ),
    Reported(
        "Ollama's runner, with a buffer",
        "true-need",
        "a smaller num_ctx",
        "Error: 500 Internal Server Error: llama runner process has terminated: cudaMalloc failed: out of memory\n"
        "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 1150681088",
        says="ollama ps",
        never="fit\\(|PyTorch",
    ),
    Reported(
        "a launch in OpenCL",
        "true-need",
        "smaller batches or buffers",
        "OpenCL error: clEnqueueNDRangeKernel: -4\n",
        says="CL_DEVICE_MAX_MEM_ALLOC_SIZE",
        never="nvidia|xpu-smi|main memory",
    ),
    Reported(
        "a buffer of PyOpenCL",
        "true-need",
        "smaller batches or buffers",
        "pyopencl._cl.MemoryError: clEnqueueNDRangeKernel failed: MEM_OBJECT_ALLOCATION_FAILURE\n",
        never="main memory|DataLoader",
    ),
    Reported(
        "OpenCL's resources",
        "true-need",
        "smaller batches or buffers",
        "OpenCL error: CL_OUT_OF_RESOURCES (-5) in clEnqueueReadBuffer",
        says="out of bounds",
        never="xpu-smi",
    ),
    Reported(
        "boxes and anchors of mmdet",
        "huge-tensor",
        "fewer boxes at once",
        "Traceback (most recent call last):\n"
        '  File "/opt/v/lib/python3.11/site-packages/mmengine/runner/runner.py", line 61, in train\n'
        "    model = self.train_loop.run()\n"
        '  File "/opt/v/lib/python3.11/site-packages/mmdet/models/task_modules/assigners/max_iou_assigner.py", line 62, in assign\n'
        "    overlaps = self.iou_calculator(gt_bboxes, priors)\n"
        '  File "/opt/v/lib/python3.11/site-packages/mmdet/structures/bbox/bbox_overlaps.py", line 63, in bbox_overlaps\n'
        "    wh = fp16_clamp(rb - lt, min=0)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.45 GiB. GPU 0 has a total capacity of 5.78 GiB of which 606.62 MiB is free. Including non-PyTorch memory, this process has 4.30 GiB memory in use. Of the allocated memory 4.13 GiB is allocated by PyTorch, and 37.56 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
        says="gpu_assign_thr",
        never="logits",
    ),
    Reported(
        "a transducer's joint",
        "true-need",
        "fused_batch_size",
        "Traceback (most recent call last):\n"
        '  File "/opt/v/lib/python3.11/site-packages/nemo/collections/asr/models/rnnt_models.py", line 61, in training_step\n'
        "    joint = self.joint(encoder_outputs=encoded, decoder_outputs=decoder)\n"
        '  File "/opt/v/lib/python3.11/site-packages/nemo/collections/asr/modules/rnnt.py", line 62, in joint_after_projection\n'
        "    inp = f + g  # [B, T, U, H]\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.62 GiB. GPU 0 has a total capacity of 47.53 GiB of which 5.20 GiB is free. Including non-PyTorch memory, this process has 42.30 GiB memory in use. Of the allocated memory 40.10 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
    ),
    Reported(
        "Megatron's gradient buffer",
        "engine-buffers",
        "--use-distributed-optimizer",
        "Traceback (most recent call last):\n"
        '  File "/w/pretrain_gpt.py", line 61, in <module>\n'
        "    pretrain(\n"
        '  File "/w/megatron/training/training.py", line 62, in get_model\n'
        "    model = [DP(config=config,\n"
        '  File "/w/megatron/core/distributed/param_and_grad_buffer.py", line 63, in __init__\n'
        "    self.grad_data = torch.zeros(\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.10 GiB. GPU 0 has a total capacity of 79.11 GiB of which 21.40 GiB is free. Including non-PyTorch memory, this process has 57.70 GiB memory in use. Of the allocated memory 56.90 GiB is allocated by PyTorch, and 11.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
        says="before any step",
        never="logits|one tensor|single tensor",
    ),
    Reported(
        "TensorRT's builder",
        "not-pytorch",
        "a smaller workspace",
        "[11/22/2024-13:40:47] [E] Error[9]: Error Code: 9: Skipping tactic 0x0000000000000000 due to exception [tunable_graph.cpp:create:117] autotuning: User allocator error allocating 15485030400-byte buffer\n"
        "[11/22/2024-13:40:47] [E] Error[10]: IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any implementation for node {ForeignNode[/1/Constant_36_output_0.../1/Slice_4]}.)\n",
    ),
    Reported(
        "RMM before 0.13",
        "not-pytorch",
        "check nvidia-smi for",
        "rmm.rmm.RMMError: RMM_ERROR_OUT_OF_MEMORY",
        says="spill",
        never="fit\\(|main memory",
    ),
    Reported(
        "RMM's pool",
        "not-pytorch",
        "check nvidia-smi for",
        "MemoryError: std::bad_alloc: out_of_memory: RMM failure at:/conda/include/rmm/mr/device/pool_memory_resource.hpp:196: Maximum pool size exceeded",
        says="maximum",
        never="fit\\(",
    ),
    Reported(
        "fairseq's optimizer",
        "optimizer-first-step",
        "--max-tokens",
        "RuntimeError: OOM during optimization, irrecoverable\n",
        says="Adam",
        never="fit\\(",
    ),
    Reported(
        "TensorFlow's warning",
        "true-need",
        "do nothing if the program continues",
        "2021-03-02 11:02:14.1: W tensorflow/core/common_runtime/bfc_allocator.cc:314] Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.91GiB with freed_by_count=0. The caller indicates that this is not a failure, but this may mean that there could be performance gains if more memory were available.\n",
        says="no failure",
        never="JAX",
        certain=False,
    ),
    Reported(
        "TensorFlow's error after its warning",
        "true-need",
        "smaller batches",
        "2021-03-02 11:02:14.1: W tensorflow/core/common_runtime/bfc_allocator.cc:314] Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.91GiB with freed_by_count=0. The caller indicates that this is not a failure, but this may mean that there could be performance gains if more memory were available.\n"
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:\n"
        "OOM when allocating tensor with shape[64,512,112,112] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc\n",
        never="no failure",
    ),
    Reported(
        "a constant of XLA",
        "true-need",
        "smaller batches",
        "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: Failed to allocate 805306368 bytes for new constant\n",
        never="main memory",
    ),
    Reported(
        "cuDNN under JAX",
        "other-process",
        "check nvidia-smi for",
        "jaxlib.xla_extension.XlaRuntimeError: FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details.\n",
        says="PREALLOCATE",
        never="fit\\(",
        certain=False,
    ),
    Reported(
        "Numba",
        "not-pytorch",
        "check nvidia-smi for",
        "numba.cuda.cudadrv.driver.CudaAPIError: [2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY\n",
        says="deallocations",
        never="fit\\(",
    ),
    Reported(
        "ONNX Runtime's limit",
        "cap",
        "a larger gpu_mem_limit",
        "onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException: [ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. Name:'Conv_12' Status Message: /onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*, bool, onnxruntime::WaitNotificationFn) Available memory of 1073741824 is smaller than requested bytes of 2147483648\n",
        never="fit\\(",
    ),
    Reported(
        "a small request on Windows with ROCm",
        "driver",
        "rocm-smi",
        "Traceback (most recent call last):\n"
        '  File "C:\\ComfyUI\\execution.py", line 61, in execute\n'
        "    output_data = get_output_data(obj)\n"
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.92 GiB of which 15.77 GiB is free. Of the allocated memory 93.30 MiB is allocated by PyTorch, and 4.70 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_HIP_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
        says="15.8 GiB are free",
        never="nvidia|fragment",
    ),
    Reported(
        "a dimension of MPS",
        "cap",
        "make it in pieces",
        "/AppleInternal/Library/BuildRoots/x/MPSCore/Types/MPSNDArray.mm:829: failed assertion `[MPSNDArray initWithDevice:descriptor:isTextureBacked:] Error: NDArray dimension length > INT_MAX'\n",
        says="2\\*\\*31",
        never="nvidia",
    ),
    Reported(
        "a node of Kubernetes",
        "host-memory",
        "resources.requests.memory",
        "Warning  SystemOOM  4m12s  kubelet  System OOM encountered, victim process: python, pid: 30412\n",
        never="nvidia",
    ),
    Reported(
        "Vertex AI with its reason",
        "host-memory",
        "resources.limits.memory",
        "The replica workerpool0-0 exited with a non-zero status of 137. To find out more about why your job exited please check the logs. Termination reason: OOMKilled.\n",
        never="nvidia",
    ),
    Reported(
        "a runner of GitHub",
        "host-memory",
        "free -h",
        "The hosted runner lost communication with the server. Anything in your workflow that terminates the runner process, starves it for CPU/Memory, or blocks its network access can cause this error.\n",
        says="runner",
        never="nvidia",
        certain=False,
    ),
    Reported(
        "LMDeploy",
        "true-need",
        "cache_max_entry_count",
        "[TM][ERROR] CUDA runtime error: out of memory /opt/lmdeploy/src/turbomind/utils/memory_utils.cu:32\n",
        never="fit\\(",
    ),
    Reported(
        "TensorRT-LLM",
        "true-need",
        "free_gpu_memory_fraction",
        "[TensorRT-LLM][ERROR] Assertion failed: [TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory (/src/tensorrt_llm/runtime/tllmBuffers.h:125)\n",
        never="fit\\(",
    ),
    Reported(
        "a compiler of CUDA",
        "host-memory",
        "MAX_JOBS",
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)\nninja: build stopped: subcommand failed.\n",
        never="nvidia-smi",
    ),
    Reported(
        "a build that was ended",
        "host-memory",
        "MAX_JOBS",
        "FAILED: flash_fwd.o\nKilled\nninja: build stopped: subcommand failed.\n",
        never="nvidia-smi",
        certain=False,
    ),
    Reported(
        "Julia on the host",
        "host-memory",
        "array's size",
        "ERROR: LoadError: OutOfMemoryError()\n",
        never="nvidia",
    ),
    Reported(
        "mpirun",
        "host-memory",
        "dmesg",
        "mpirun noticed that process rank 3 with PID 0 on node gpu7 exited on signal 9 (Killed).\n",
        never="nvidia",
        certain=False,
    ),
    Reported(
        "a container that did not start",
        "host-memory",
        "limit of the container",
        "start container for image\n"
        "error starting container: OCI runtime create failed: container init was OOM-killed (memory limit too low?)\n",
        never="nvidia",
    ),
    Reported(
        "Slurm of 2024",
        "host-memory",
        "sbatch --mem",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed.\n"
        "srun: error: gpu001: task 0: Out Of Memory\n",
        never="nvidia",
    ),
    Reported(
        "a shell, in the middle of a log",
        "host-memory",
        "dmesg",
        "Epoch: [0][447/1736]\t Loss 0.5504 MAE 0.6353 RMSE 0.7419\n"
        "Epoch: [0][479/1736]\t Loss 0.6319 MAE 0.5976 RMSE 0.7949\n"
        "Killed\n"
        "(abnn) me@c002:~/work$ \n",
        never="nvidia",
        certain=False,
    ),
    Reported(
        "gaps, in the message's own words",
        "fragmentation",
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.04 GiB memory in use. Of the allocated memory 66.90 GiB is allocated by PyTorch, and 10.41 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
        never="PYTORCH_CUDA_ALLOC_CONF",
    ),
    Reported(
        "gaps on ROCm",
        "fragmentation",
        "PYTORCH_HIP_ALLOC_CONF=garbage_collection_threshold:0.8",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.98 GiB of which 0.70 GiB is free. Of the allocated memory 14.10 GiB is allocated by PyTorch, and 8.41 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_HIP_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
        never="PYTORCH_CUDA_ALLOC_CONF|expandable_segments",
    ),
    Reported(
        "Megatron's logits in float32",
        "true-need",
        "lowtide.fit(",
        "Traceback (most recent call last):\n"
        '  File "/w/megatron/training/training.py", line 61, in train_step\n'
        "    losses_reduced = forward_backward_func(\n"
        '  File "/w/megatron/core/tensor_parallel/cross_entropy.py", line 62, in calculate_logits_max\n'
        "    vocab_parallel_logits = vocab_parallel_logits.float()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 79.11 GiB of which 3.40 GiB is free. Including non-PyTorch memory, this process has 75.70 GiB memory in use. Of the allocated memory 72.90 GiB is allocated by PyTorch, and 211.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
    ),
    Reported(
        "Unsloth's logits",
        "true-need",
        "lowtide.fit(",
        "Traceback (most recent call last):\n"
        '  File "/content/unsloth_compiled_cache/UnslothSFTTrainer.py", line 61, in compute_loss\n'
        "    outputs = super().compute_loss(\n"
        '  File "/opt/v/lib/python3.11/site-packages/unsloth/models/llama.py", line 62, in CausalLM_fast_forward\n'
        "    logits = self.lm_head(hidden_states.to(lm_head.dtype))\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 14.74 GiB of which 1.17 GiB is free. Including non-PyTorch memory, this process has 13.57 GiB memory in use. Of the allocated memory 13.11 GiB is allocated by PyTorch, and 332.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
    ),
    Reported(
        "xformers in backward",
        "fragmentation",
        "expandable_segments",
        "Traceback (most recent call last):\n"
        '  File "/w/train_unet.py", line 61, in <module>\n'
        "    loss.backward()\n"
        '  File "/opt/v/lib/python3.11/site-packages/torch/autograd/graph.py", line 62, in _engine_run_backward\n'
        "    return Variable._execution_engine.run_backward(\n"
        '  File "/opt/v/lib/python3.11/site-packages/xformers/ops/fmha/cutlass.py", line 63, in apply\n'
        "    (grad_q, grad_k, grad_v,) = cls.OPERATOR(\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 640.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 411.00 MiB is free. Including non-PyTorch memory, this process has 23.10 GiB memory in use. Of the allocated memory 21.20 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management",
    ),
]
