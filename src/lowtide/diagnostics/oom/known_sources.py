"""Programs with a fixed message when they end a process for its memory, and for each message its meaning and the
remedy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Cause of all out-of-memory messages of one program, and the remedy."""

    code: str
    claim: str
    evidence: str
    actions: tuple[str, ...]


def _source(code: str, claim: str, evidence: str, *actions: str) -> Source:
    """Return a source, its `actions` best first."""
    return Source(code=code, claim=claim, evidence=evidence, actions=actions)


_LESS_HOST_MEMORY = (
    "fewer DataLoader workers (num_workers), a smaller prefetch_factor, no copy of the data set per worker",
    "torch.load(..., mmap=True); checkpoints on one rank; no whole epoch of predictions in a list",
)


def _host_memory(claim: str, evidence: str, *actions: str) -> Source:
    """Return a source that ran out of host memory: it gets `actions`, and the advice to use less."""
    return _source("host-memory", claim, evidence, *actions, *_LESS_HOST_MEMORY)


SOURCES: dict[str, Source] = {
    "Slurm": _host_memory(
        "Slurm ended the task: the job used more host memory than it had asked for",
        "the limit is the job's --mem or --mem-per-cpu; the GPU's memory is not concerned",
        "ask for more: sbatch --mem=64G, or --mem=0 for the whole node; `seff JOBID` shows the peak",
    ),
    "PBS": _host_memory(
        "PBS ended the job: it used more host memory than it had asked for",
        "the limit is the job's mem or vmem; the GPU's memory is not concerned",
        "ask for more: qsub -l select=1:mem=64gb; `qstat -fx JOBID` shows the peak",
    ),
    "LSF": _host_memory(
        "LSF ended the job: it used more host memory than its limit",
        "TERM_MEMLIMIT is the limit of bsub -M; the GPU's memory is not concerned",
        'ask for more: bsub -M 64GB -R "rusage[mem=64GB]"; `bhist -l JOBID` shows the peak',
    ),
    "SGE": _host_memory(
        "Grid Engine ended the job: it used more host memory than it had asked for",
        "the limit is the job's h_vmem; the GPU's memory is not concerned",
        "ask for more: qsub -l h_vmem=64G; `qacct -j JOBID` shows maxvmem",
    ),
    "AWS Batch": _host_memory(
        "AWS Batch ended the container: it reached the memory of its job definition",
        "the kernel ends a container at its limit, whatever the instance has free",
        "raise MEMORY in resourceRequirements of the job definition, within the instance's memory",
    ),
    "Kubernetes": _source(
        "host-memory",
        "the container was ended for its memory (OOMKilled): it reached its limit, or the node ran out",
        "OOMKilled is the kernel's own verdict: host memory, not the GPU's",
        "raise resources.limits.memory of the container; `kubectl top pod` shows the usage before the end",
        "give /dev/shm an emptyDir of medium Memory: its pages count toward the limit",
    ),
    "Linux": _host_memory(
        "the kernel ended a process to get host memory back: the machine's, or the container's limit, is used up",
        "the kernel's own message: host memory, not the GPU's",
        "dmesg names the process and its memory (anon-rss); raise the limit of the container if it has one",
    ),
    "a control group": _host_memory(
        "the kernel ended a process: the limit of a container, a job or a unit (its control group) is reached",
        "whatever the rest of the system has free: host memory, not the GPU's",
        "dmesg names the process and its memory (anon-rss); raise the limit: docker run --memory, "
        "resources.limits.memory, MemoryMax=, Slurm's --mem",
    ),
    "memory.events": _host_memory(
        "the kernel ended processes of this control group (a container, a job, a unit) to get host memory back",
        "oom_kill counts them: the group's limit (memory.max) was reached, or the whole machine was full",
        "raise the group's limit (memory.max): docker run --memory, resources.limits.memory, MemoryMax=",
        "compare memory.peak with memory.max; if it stayed below, dmesg names the process that filled the machine",
    ),
    "a memory daemon": _host_memory(
        "a daemon (systemd-oomd, earlyoom) ended a process before the machine's memory was used up",
        "it goes by memory pressure or free memory, and takes the largest process: host memory, not the GPU's",
        "more memory or swap, or another limit: ManagedOOMMemoryPressureLimit of the slice, earlyoom -m",
    ),
    "pinning": _source(
        "pinned-memory",
        "the DataLoader's pin_memory thread has ended: it was refused pinned memory or a context on the GPU",
        "its own error is further up in the log, if it could write one",
        "DataLoader(pin_memory=False) shows if that is all; then a smaller prefetch_factor and fewer workers",
        "see with nvidia-smi that the GPU is not full, and the limit on locked memory (ulimit -l)",
    ),
    "DataLoader": _host_memory(
        "the kernel ended a DataLoader worker: host memory of the machine, or of the container, is used up",
        "workers hold their own copies of what the data set touches, times prefetch_factor batches",
    ),
    "shells, torchrun and containers": _host_memory(
        "the system ended a process, most likely to get host memory back: the machine's or the container's",
        "SIGKILL (exit code 137, or -9) leaves no reason; `dmesg | grep -i oom` says whether it was memory",
        "look: dmesg | grep -i oom, or `kubectl describe pod` (Reason: OOMKilled)",
    ),
    "Colab": _host_memory(
        "the machine's RAM is used up: Colab ended the session",
        "this is host memory; the GPU's is reported by PyTorch itself",
        "load less at once: stream the data set, or a high-RAM runtime",
    ),
    "Kaggle": _host_memory(
        "the machine's RAM is used up: Kaggle restarted the notebook",
        "this is host memory; the GPU's is reported by PyTorch itself",
        "load less at once: stream the data set, a smaller dtype",
    ),
    "HTCondor": _host_memory(
        "HTCondor ended or held the job: it used more host memory than it had asked for",
        "the limit is request_memory; the GPU's memory is not concerned",
        "ask for more: request_memory = 64GB in the submit file",
    ),
    "Jupyter": _host_memory(
        "the notebook's kernel died, most likely because the machine's RAM is used up",
        "out of host memory, a kernel ends without a traceback; crashes in libraries look the same",
        "watch RAM while it runs (free -h), or run the cell as a script: `dmesg | grep -i oom` then says why",
    ),
    "Windows": _source(
        "host-memory",
        "Windows' commit limit is reached: the paging file is too small (error 1455)",
        "each process that loads CUDA's libraries reserves gigabytes, and so does each DataLoader worker",
        "enlarge the paging file (System, Advanced, Performance, Virtual memory), or let Windows manage its size",
        "fewer DataLoader workers: num_workers=0 at first, and `if __name__ == '__main__':` around the script",
    ),
    "Kubernetes, the node": _host_memory(
        "the node ran low on host memory: Kubernetes evicted a pod, or the kernel ended one of its processes",
        "both take the pod that uses most beyond its resources.requests.memory; the GPU is not concerned",
        "set resources.requests.memory to what the pod needs, and the limit to the same: such nodes are chosen",
        "give emptyDir volumes of medium Memory a sizeLimit: their pages count",
    ),
    "SageMaker": _host_memory(
        "the instance's host memory is used up: SageMaker ended the job",
        "this is the instance's main memory, not the GPU's",
        "an instance type with more memory, or input by streaming (FastFile, Pipe mode)",
    ),
    "Dask": _source(
        "host-memory",
        "Dask's nanny restarted a worker: it used more host memory than the worker's limit",
        "the limit is memory_limit of the worker: by default its share of the machine",
        "smaller partitions, or fewer threads a worker; a larger memory_limit if the machine has room",
        "do not collect large results on one worker: persist() and write them out",
    ),
    "a compiler": _source(
        "host-memory",
        "the system ended a compiler to get host memory back: too many compile jobs run at once",
        "extensions such as flash-attn and DeepSpeed's ops start one job for each core, of some GiB each",
        "MAX_JOBS=2 before pip install or the first use",
        "or a prebuilt wheel for this torch and CUDA",
    ),
    "vLLM": _source(
        "cap",
        "vLLM has no memory left for its KV cache: weights and a trial run take all of gpu_memory_utilization",
        "vLLM divides total memory times gpu_memory_utilization; other processes on the GPU count against it",
        "a larger gpu_memory_utilization (0.9 by default) where the GPU is free, or a shorter max_model_len",
        "fewer max_num_seqs and enforce_eager=True; tensor_parallel_size or a quantized model for the weights",
    ),
    "vLLM's warm-up": _source(
        "true-need",
        "vLLM's sampler has no room for the logits of max_num_seqs requests beside weights and KV cache",
        "it tries once at its start what gpu_memory_utilization leaves over",
        "fewer max_num_seqs (64, say): logits are max_num_seqs rows of the vocabulary, in float32",
        "or a smaller gpu_memory_utilization, so that the KV cache takes less",
    ),
    "KV cache": _source(
        "cap",
        "vLLM's KV cache is smaller than one request of max_model_len needs",
        "the message says how many tokens fit",
        "max_model_len within that number, or a larger gpu_memory_utilization",
        'kv_cache_dtype="fp8" halves the cache; tensor_parallel_size spreads it',
    ),
    "vLLM's start": _source(
        "other-process",
        "less of the GPU is free than vLLM is set to take: other processes hold the rest",
        "vLLM takes gpu_memory_utilization of the whole GPU, not of its free part",
        "look with nvidia-smi which processes hold the GPU: another server, a notebook, an earlier engine",
        "or a smaller gpu_memory_utilization, below the free share",
    ),
    "SGLang": _source(
        "cap",
        "SGLang has no memory left for its KV cache: the weights take all of mem-fraction-static",
        "the fraction is of the whole GPU, and holds weights and cache",
        "a larger --mem-fraction-static, or --tp-size over more GPUs for the weights",
        "a shorter --context-length, a quantized model",
    ),
    "SGLang's start": _source(
        "other-process",
        "SGLang found less memory free on one GPU than on the others: another process holds the rest",
        "it compares the free memory of all ranks before it loads the model",
        "look with nvidia-smi which processes hold the GPU: an earlier server, a notebook",
        "or use other GPUs: CUDA_VISIBLE_DEVICES, --base-gpu-id",
    ),
    "llama.cpp on the host": _source(
        "host-memory",
        "llama.cpp was refused host memory: for weights, KV cache or scratch memory that is not on a GPU",
        "CPU and host buffers are main memory; the GPU's memory is not concerned",
        "a smaller or further quantized model, a shorter context (-c), or more layers on the GPU (-ngl)",
        "keep memory mapping on (no --no-mmap, no --mlock): mapped weights need no memory of their own",
    ),
    "pinned memory of llama.cpp": _source(
        "pinned-memory",
        "llama.cpp was refused pinned host memory, and goes on with ordinary memory: slower copies, same results",
        "pinned memory is bounded by the driver and the limit on locked memory, whatever is free",
        "raise the limit on locked memory (ulimit -l unlimited; under WSL more memory in .wslconfig)",
        "or GGML_CUDA_NO_PINNED=1, which does without and says nothing",
    ),
    "locked memory": _source(
        "cap",
        "the limit on locked memory is reached (ulimit -l), not the machine's memory",
        "RDMA buffers and pinned pages may not be swapped out, and count toward it",
        "raise it: ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of a unit or of slurmd",
        "without RDMA: NCCL_IB_DISABLE=1; without locked pages: no --mlock",
    ),
    "pools of llama.cpp": _source(
        "cap",
        "a pool of llama.cpp that was sized beforehand is too small; the machine's memory is not what ran out",
        "needed and available bytes are in the message",
        "a newer llama.cpp (or binding), which sizes the pool by the model",
        "until then a shorter context or a smaller batch (-c, -b)",
    ),
    "ExLlama": _source(
        "true-need",
        "weights and cache have no room in the GPU memory that ExLlama was given",
        "it loads layer by layer, up to the split of each GPU",
        "a shorter max_seq_len or a quantized cache (Q4), or fewer bits a weight",
        "a larger gpu_split, or one more GPU; see which other processes hold the GPUs",
    ),
    "CTranslate2": _source(
        "true-need",
        "CTranslate2 (faster-whisper) has no room on the GPU for the model or a batch",
        "it asks the driver through its own cache, beside PyTorch's",
        'compute_type="int8_float16" or "int8", a smaller model, batch_size and beam_size',
        "see which other processes hold the GPU; del the model and gc.collect() before another is loaded",
    ),
    "OpenCV on a GPU": _source(
        "not-pytorch",
        "memory was requested from the driver by OpenCV, and the GPU had none left",
        "GpuMat takes its memory outside every framework's cache",
        "reuse GpuMat objects, and release() those that are over; smaller images",
        "see with nvidia-smi which other processes hold the GPU; leave room beside PyTorch's cache",
    ),
    "Stable Diffusion web UI": _source(
        "true-need",
        "attention over the whole image has no room, even in the smallest slices that are tried",
        "the message says how much it needs and has; attention grows with the square of the pixels",
        "--xformers or --opt-sdp-attention: attention without the matrix of all pairs",
        "a smaller image (then upscale in tiles), --medvram or --lowvram",
    ),
    "ComfyUI's nodes": _source(
        "true-need",
        "a node of ComfyUI needs more GPU memory than there is",
        "ComfyUI drops the numbers of torch's message",
        "smaller images, batches or frames; tiled VAE nodes; weights in fp8 or GGUF",
        "--lowvram, or --reserve-vram 1 where a display shares the GPU; see which other processes hold it",
    ),
    "device_map": _source(
        "loading",
        "the quantized model has no room on the GPUs: device_map puts the rest on the CPU or the disk",
        "bitsandbytes refuses parts elsewhere unless it is told to keep them in float32",
        "free the GPU first (nvidia-smi, an earlier model of the notebook), or a smaller model or dtype",
        "or allow it, slowly: BitsAndBytesConfig(llm_int8_enable_fp32_cpu_offload=True) and your own device_map",
    ),
    "Metal beside PyTorch": _source(
        "true-need",
        "Metal has no memory left for a command of MLX or llama.cpp: model, cache and scratch exceed its share",
        "the GPU may wire about two thirds to three quarters of the machine's memory",
        "a smaller or further quantized model, a shorter context or a quantized KV cache, a smaller batch",
        "where the machine has room: sudo sysctl iogpu.wired_limit_mb=... raises the share",
    ),
    "llama.cpp": _source(
        "true-need",
        "the GPU has no room for the layers, the KV cache or the scratch memory that llama.cpp puts there",
        "it asks the driver directly; models are split by whole layers",
        "fewer layers on the GPU (-ngl), a shorter context (-c), or --cache-type-k q8_0 and --cache-type-v q8_0",
        "a compute buffer that failed: a smaller --ubatch-size, and flash attention (-fa)",
        "see which other processes hold the GPU, and split by free memory: --tensor-split",
    ),
    "Ollama's runner": _source(
        "true-need",
        "the GPU has no room for the layers, the KV cache or the scratch memory of Ollama's runner",
        "Ollama reckons beforehand what fits; a long context or several requests at a time need more",
        "a smaller num_ctx, OLLAMA_NUM_PARALLEL=1, OLLAMA_FLASH_ATTENTION=1 with OLLAMA_KV_CACHE_TYPE=q8_0",
        "fewer layers on the GPU: num_gpu; `ollama ps` and nvidia-smi show which models and processes hold it",
    ),
    "OpenCL": _source(
        "true-need",
        "OpenCL has no room on the device for a buffer or for a kernel's resources",
        "buffers get their memory at first use, so a kernel's launch may be what fails",
        "smaller batches or buffers: one may have at most CL_DEVICE_MAX_MEM_ALLOC_SIZE, often a quarter of the GPU",
        "OUT_OF_RESOURCES alone may be a kernel that reads out of bounds, or runs longer than the driver allows",
    ),
    "ORT": _source(
        "cap",
        "the limit of ONNX Runtime's arena (gpu_mem_limit of the session) is used up, not the GPU",
        "the message compares the request with what the limit leaves",
        "a larger gpu_mem_limit in the CUDA provider's options, or none",
        "smaller inputs, and arena_extend_strategy=kSameAsRequested: by default the arena doubles",
    ),
    "ONNX Runtime": _source(
        "true-need",
        "ONNX Runtime's arena has no room for a buffer on the device that the session runs on",
        "its arena grows by powers of two, and never shrinks",
        "smaller inputs, or arena_extend_strategy=kSameAsRequested and gpu_mem_limit of the CUDA provider",
        "cudnn_conv_use_max_workspace=0; one session for all threads instead of one each",
    ),
    "TensorRT": _source(
        "not-pytorch",
        "TensorRT asked the driver for an engine's memory, and the GPU had none left",
        "an engine needs its weights and workspace in one piece, beside PyTorch's cache",
        "a smaller workspace (memory pool limit) or a smaller maximum shape in the profile",
        "torch.cuda.empty_cache() before the engine is built, or build it in its own process",
    ),
    "bitsandbytes": _source(
        "not-pytorch",
        "bitsandbytes asked the driver for memory outside PyTorch's allocator, and there was none",
        "paged optimizers use managed memory, which needs pinned host memory as well (little under WSL)",
        "under WSL: more memory in .wslconfig, or an optimizer that is not paged (adamw_bnb_8bit)",
        "smaller batches, so that PyTorch's cache leaves room: lowtide.fit(model, step, batch, budget=...)",
    ),
    "pools of TensorFlow and JAX": _source(
        "other-process",
        "TensorFlow or JAX could not take its pool: the GPU has less free than it asks for at its start",
        "both take nearly the whole GPU at once; smaller tries follow, so that the program may go on",
        "look with nvidia-smi which processes hold the GPU: another process, a notebook that still runs",
        "or let the pool grow: TF_FORCE_GPU_ALLOW_GROWTH=true, XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    "fairseq": _source(
        "true-need",
        "a batch did not fit and fairseq goes on with the next one: its gradients are lost",
        "mostly the longest sentences of the data: a batch has as many tokens as max-tokens allows",
        "a smaller --max-tokens, with --update-freq larger in proportion",
        "a cap on the length of sentences: --max-source-positions, --max-target-positions",
    ),
    "fairseq's optimizer": _source(
        "optimizer-first-step",
        "fairseq's optimizer has no room for its state or temporaries, and such a step can't be skipped",
        "the optimizer creates its state in the first step: for Adam two copies of the parameters",
        "a smaller --max-tokens; the state stays, so the rest of the step must shrink",
        "a smaller state: --memory-efficient-fp16, --optimizer adafactor; or shards (--ddp-backend fully_sharded)",
    ),
    "RAPIDS": _source(
        "not-pytorch",
        "RAPIDS' memory resource (RMM) has no room on the GPU, or its pool has reached its maximum",
        "cuDF and cuML keep whole tables on the GPU, and need two to four times a table to sort or join it",
        "look with nvidia-smi which processes hold the GPU: a second notebook, a framework's cache or pool",
        'room on the host: cudf.set_option("spill", True), or rmm.reinitialize(managed_memory=True)',
        "less at once: usecols and smaller dtypes, or dask_cudf with partitions of some hundred MB",
    ),
    "Faiss": _source(
        "not-pytorch",
        "Faiss asked the driver for memory outside PyTorch's allocator, and none was left",
        "each StandardGpuResources takes 1.5 GiB of scratch memory at once, besides the index",
        "one StandardGpuResources for all calls, with a smaller setTempMemory(256 << 20) or noTempMemory()",
        "torch.cuda.empty_cache() before it; an index in float16 (useFloat16), quantized, or on several GPUs",
    ),
    "boosted trees": _source(
        "not-pytorch",
        "the booster (XGBoost, CatBoost, LightGBM) has no room on the GPU for its data and histograms",
        "the training set is on the GPU as a whole, and other frameworks keep what they have freed",
        "look with nvidia-smi which processes hold the GPU: a framework's cache, a notebook",
        (
            "a smaller max_depth and max_bin (border_count), a sample of rows (subsample with gradient_based), or "
            "external memory"
        ),
    ),
    "DALI": _source(
        "not-pytorch",
        "DALI's decoder asked the driver for memory outside PyTorch's allocator, and none was left",
        "the largest image decides: each decoding thread keeps a buffer of its size",
        "fewer num_threads, a smaller prefetch_queue_depth and batch; shrink images of many megapixels beforehand",
        "run DALI first, before PyTorch's cache has taken the GPU, or decode on the CPU",
    ),
    "OpenVINO": _source(
        "cap",
        "one buffer is larger than the device allows, whatever memory is free",
        "the message states the request and the limit for a single buffer",
        "a smaller batch or shorter context, a lower precision of weights and cache",
        "ov::intel_gpu::hint::enable_large_allocations where the device can do it",
    ),
    "Jetson": _source(
        "true-need",
        "the Jetson's memory, which CPU and GPU share, is used up or in too small pieces",
        "the driver's own message (error 12: no memory)",
        "free memory: stop the desktop and other programs, drop caches (sysctl vm.drop_caches=3), or restart",
        "a smaller model, batch or image, fewer libraries (cuDNN and TensorRT take hundreds of MB); add swap",
    ),
    "MATLAB": _source(
        "not-pytorch",
        "MATLAB has no room on the GPU for an array",
        "arrays stay there until their variables are cleared",
        "gpuDevice shows the free memory: clear variables, smaller MiniBatchSize, single instead of double",
        "see with nvidia-smi which other processes hold the GPU",
    ),
    "tactics of TensorRT": _source(
        "cap",
        "TensorRT left out an algorithm whose workspace is larger than it may take: a warning, no failure",
        "the message states what the algorithm needs and what is available",
        "nothing, if the engine is built; a larger workspace (memory pool limit) where the GPU has room",
        "if the build failed: give the rest of the log, from this line on",
    ),
    "Numba": _source(
        "not-pytorch",
        "Numba asked the driver for memory on the GPU, and none was left",
        "it frees arrays in groups, and other frameworks keep what they have freed",
        "look with nvidia-smi which processes hold the GPU; leave room beside PyTorch's or CuPy's cache",
        "reuse device arrays (cuda.to_device(..., to=...)), and numba.cuda.current_context().deallocations.clear()",
    ),
    "TensorRT-LLM": _source(
        "true-need",
        "TensorRT-LLM has no room on the GPU for the engine's weights, workspace or KV cache",
        "the KV cache takes a share of what is free after the engine is loaded",
        "a smaller free_gpu_memory_fraction of the KV cache (0.9 by default), max_num_tokens or max_batch_size",
        "tensor parallel (--tp_size) or a quantized model for the weights",
    ),
    "LMDeploy": _source(
        "true-need",
        "LMDeploy's engine has no room on the GPU for weights, KV cache or scratch memory",
        "the KV cache takes cache_max_entry_count of the free memory (0.8 by default)",
        "a smaller cache_max_entry_count (--cache-max-entry-count 0.4), session_len or max_prefill_token_num",
        "--quant-policy 8 for the cache; --tp over more GPUs, or AWQ weights",
    ),
    "warnings of TensorFlow": _source(
        "true-need",
        "TensorFlow had no room for a faster algorithm's workspace and goes on with less: a warning, no failure",
        "the message says so itself; if the program ended, another message tells the cause",
        "nothing, if the program goes on; smaller batches bring the faster algorithms back",
        "if it ended: give the rest of the log, from this line on",
    ),
    "libraries of XLA": _source(
        "other-process",
        "cuDNN could not start for JAX, most likely because the GPU's memory was taken",
        "JAX preallocates 75 % of the GPU at its start; cuDNN's handle must fit beside it and other processes",
        "look with nvidia-smi which processes hold the GPU: another JAX, a notebook that still runs",
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.6 or XLA_PYTHON_CLIENT_PREALLOCATE=false; a cuDNN that fits jaxlib",
    ),
    "GitHub Actions": _source(
        "host-memory",
        "the runner stopped answering, most likely because the job took all its memory or all its cores",
        "GitHub cannot tell which: a hosted Linux runner has 7 to 16 GB of memory and no limit for a job",
        "print the memory while the job runs (free -h in a loop), or run it in a container with --memory",
        "fewer processes at a time (pytest -n, MAX_JOBS), a smaller model or data set, or a larger runner",
    ),
    "Julia": _source(
        "host-memory",
        "Julia was refused host memory for an array",
        "its OutOfMemoryError is about main memory; for the GPU there is another message",
        "print the array's size: one dimension may be wrong; then blocks, views, or a smaller element type",
        "a limit: --heap-size-hint lets Julia collect garbage earlier; free -h shows the machine's memory",
    ),
    "Ultralytics": _source(
        "true-need",
        "matching boxes with anchors did not fit, and Ultralytics does it on the CPU: right, but slow",
        "its memory grows with the boxes of the fullest image, times the batch",
        "a smaller batch= or imgsz=: batch=-1 (AutoBatch) does not see the fullest image",
        "fewer boxes in one image: tiles of large images, a cap on objects",
    ),
    "ComfyUI": _source(
        "true-need",
        "the VAE did not fit for the whole image, and ComfyUI goes on in tiles",
        "activations of the decoder grow with the pixels, not with the model",
        "the tiled VAE node from the start, with smaller tiles",
        "smaller images or batches; --lowvram",
    ),
    "PaddlePaddle": _source(
        "true-need",
        "PaddlePaddle's allocator has no room on the GPU: what it holds and the request are more than there is",
        "it takes its memory in chunks, and keeps them",
        "smaller batches, use_recompute=True, or paddle.amp",
        "see which other processes hold the GPU; FLAGS_fraction_of_gpu_memory_to_use bounds what Paddle takes",
    ),
    "MXNet": _source(
        "true-need",
        "MXNet's memory pool has no room on the GPU, even after it has released what it held unused",
        "it gives its unused memory back and tries once more before it reports this",
        "smaller batches; MXNET_BACKWARD_DO_MIRROR=1 recomputes activations",
        "see which other processes hold the GPU",
    ),
    "Tenstorrent": _source(
        "true-need",
        "the Tenstorrent device has no room for a buffer, which has to fit into each of its memory banks",
        "a buffer is spread over all banks: the fullest one, or the one with the smallest free piece, decides",
        "smaller batches or shorter rows; ttnn.deallocate(tensor) for tensors that are over",
        "bfloat8_b instead of bfloat16 for weights, or tensors in DRAM instead of L1",
    ),
    "CUDA.jl": _source(
        "true-need",
        "Julia's memory pool has no room on the GPU, and collecting garbage freed too little",
        "CUDA.jl frees arrays only when Julia's garbage collector has seen that they are gone",
        "CUDA.unsafe_free!(x) for arrays that are over, or GC.gc(); CUDA.reclaim() gives the pool back",
        "smaller batches; see which other processes hold the GPU",
    ),
    "MindSpore": _source(
        "true-need",
        "MindSpore has no room on the device for a kernel's memory",
        "the limit is max_device_memory of the context, or the device itself",
        "smaller batches, or cell.recompute() for repeated cells",
        'a larger max_device_memory: mindspore.set_context(max_device_memory="30GB")',
    ),
    "TensorFlow": _source(
        "true-need",
        "TensorFlow has no room on the GPU for a tensor: what it holds and the request are more than there is",
        "it takes almost the whole GPU at its start, and divides it itself",
        "smaller batches or shorter rows; mixed_float16, or tf.recompute_grad around blocks",
        "see with nvidia-smi which other processes hold the GPU; set_memory_growth (tf.config) leaves them room",
    ),
    "copies of TensorFlow": _source(
        "true-need",
        "TensorFlow has no room on the GPU for a tensor that it copies there",
        "`Dst tensor is not initialized` says so: the copy's memory was refused",
        "smaller batches; no whole data set as one constant (tf.data on the CPU instead)",
        "see which other processes hold the GPU, and end what an earlier notebook has left there",
    ),
    "TensorFlow on the host": _source(
        "host-memory",
        "TensorFlow asked for main memory and the machine had none left; the GPU is not concerned",
        "the tensor was to be on the CPU",
        "no whole data set as one tensor: tf.data from files, in batches",
        "smaller batches, a smaller dtype, fewer prefetched batches and parallel calls",
    ),
    "TGI": _source(
        "cap",
        "text-generation-inference has no room for a prefill of so many tokens beside the weights",
        "it tries the largest prefill once at its start",
        "a smaller --max-batch-prefill-tokens, and --max-input-tokens within it",
        "a quantized model (--quantize), or --num-shard over more GPUs",
    ),
    "Ollama": _source(
        "host-memory",
        "the machine has less free RAM than Ollama reckons for the model",
        "both numbers are in the message; layers that are not on a GPU count as RAM",
        "a smaller or further quantized model, or a smaller num_ctx",
        "more layers on the GPU (num_gpu), or free RAM: other programs, a container's limit",
    ),
    "Vulkan": _source(
        "not-pytorch",
        "memory was requested from the driver by Vulkan, and the GPU had none left",
        "it is outside every framework's cache",
        "fewer layers or smaller images on the GPU",
        "see which other processes hold the GPU: a display, a game, another process",
    ),
    "YARN": _source(
        "host-memory",
        "YARN ended a container of Spark: it used more host memory than its limit",
        "memory outside Java's heap counts: Python workers and their tensors are there",
        "a larger spark.executor.memoryOverhead, or spark.executor.pyspark.memory",
        "fewer cores an executor, smaller partitions",
    ),
    "Spark's workers": _source(
        "host-memory",
        "Spark lost an executor or one of its Python workers, most likely for host memory",
        "Python workers and their tensors are outside Java's heap, and count toward the container's limit",
        "a larger spark.executor.memoryOverhead, or spark.executor.pyspark.memory",
        "fewer cores an executor, smaller partitions, a smaller spark.sql.execution.arrow.maxRecordsPerBatch",
        "look in the executor's own log: a crash in a library looks the same",
    ),
    "Java's heap": _source(
        "host-memory",
        "Java's heap is full: its limit, not the machine's memory",
        "Spark's driver and executors run in Java, and collect results there",
        "a larger heap: -Xmx, spark.driver.memory or spark.executor.memory",
        "collect less: no toPandas() or collect() of a whole table",
    ),
    "Java beside its heap": _source(
        "cap",
        "a limit of Java beside its heap is reached (class metadata, or direct buffers)",
        "the limit is Java's own, not the machine's memory",
        "raise it: -XX:MaxMetaspaceSize, or -XX:MaxDirectMemorySize for direct buffers",
        "smaller blocks and fewer fetched at a time (spark.reducer.maxSizeInFlight)",
    ),
    "Node.js": _source(
        "cap",
        "the heap of Node.js is full: its limit, not the machine's memory",
        "a program in JavaScript beside Python (a front end, an extension of Jupyter, a build) has ended",
        "a larger heap: NODE_OPTIONS=--max-old-space-size=8192",
        "in Jupyter: clear large outputs of the notebook",
    ),
    "DuckDB": _source(
        "cap",
        "DuckDB's memory_limit is used up (80 % of the machine's memory by default)",
        "the message states what is used, of the limit",
        "SET memory_limit, SET threads to fewer, and SET temp_directory so that it may spill to disk",
        "less at once: columns that are needed, batches of rows instead of a whole table",
    ),
    "macOS": _host_memory(
        "macOS ended a process, or asks to end some, because its memory and swap are used up",
        "on Apple silicon the GPU's memory is part of it",
        "look in Activity Monitor which processes hold memory; free disk space for swap",
        "smaller batches or a smaller model; lower PYTORCH_MPS_HIGH_ and LOW_WATERMARK_RATIO make torch fail first",
    ),
    "Dask's workers": _source(
        "host-memory",
        "workers of Dask died while they ran one task, most likely for their memory",
        "the worker's own log says why it ended",
        "look in the workers' logs; a larger memory_limit, or fewer threads a worker",
        "smaller partitions: the task of one has to fit into a worker",
    ),
    "pools of processes": _source(
        "host-memory",
        "a worker process ended without a word, most likely for host memory",
        "the kernel ends the largest process; a crash in a library looks the same",
        "fewer workers (num_proc, n_jobs, max_workers, nnUNet_n_proc_DA): each has its own copy of what it touches",
        "smaller pieces: writer_batch_size of datasets' map; `dmesg | grep -i oom` tells if it was memory",
    ),
    "gunicorn": _source(
        "host-memory",
        "a worker of the server was ended, most likely for host memory",
        "each worker loads its own model; gunicorn sends SIGKILL after a timeout, too",
        "one worker with threads, or preload_app with the model loaded before the fork",
        "a larger limit of the container, and a longer --timeout if no memory was missing (dmesg | grep -i oom)",
    ),
    "fork": _source(
        "host-memory",
        "the system refused a new process: too little memory is left to promise it a copy of its parent's",
        "a fork needs no memory at once, but the kernel must be able to commit it",
        "look: free -h and the container's limit; end what holds the memory, or add swap",
        "fewer DataLoader workers, started before large arrays are made; or vm.overcommit_memory=1 on your machine",
    ),
    "threads and processes": _source(
        "cap",
        "a limit on threads and processes is reached (ulimit -u, or pids of the container)",
        "memory is not what ran out, unless ulimit -v or a full machine leaves no room for a stack",
        "fewer threads: OMP_NUM_THREADS=1 and OPENBLAS_NUM_THREADS=1 for each worker, fewer DataLoader workers",
        "raise it: ulimit -u 65536; docker run --pids-limit -1",
    ),
    "a service's limit": _host_memory(
        "the service ended the program at its memory limit: main memory, not the GPU's",
        "the service's own message",
        "a larger memory size for the job, function or machine",
    ),
    "limits of a launch": _source(
        "cap",
        "a kernel was launched with more blocks, threads or registers than the GPU allows, or with none",
        "memory is not what ran out: a grid has at most 65,535 blocks in its second and third direction",
        (
            "find the operator (CUDA_LAUNCH_BLOCKING=1): an empty tensor, batch x heads beyond 65,535 in attention, "
            "swapped dimensions"
        ),
        "a smaller batch, in pieces (lowtide.accumulate), or a newer version of the library that has the kernel",
    ),
    "libraries on the host": _source(
        "host-memory",
        "a library was refused host memory: the machine's is used up, or a limit is reached",
        "it asked the system directly; the GPU's memory is not concerned",
        "look: free -h, ulimit -v, and the container's limit",
        "less at once: smaller images or tables, fewer processes with a copy each",
    ),
    "MLX": _source(
        "cap",
        "one buffer is larger than Metal allows on this machine",
        "the limit is for a single buffer, whatever memory is free",
        "make the array in pieces: shorter rows, smaller batches",
        "a quantized model, a shorter cache",
    ),
    "arrays of MPS": _source(
        "cap",
        "a single array is larger than MPS can address: 2**32 bytes (4 GiB), or 2**31 elements in a dimension",
        "the limit is for one array, whatever memory is free",
        "make it in pieces: smaller batches, attention in slices, VAE in tiles",
        "a newer macOS (15 or later) and torch, or the CPU for this operation",
    ),
    "a full disk": _source(
        "cap",
        "a disk is full: the file named in the message; memory is not what ran out",
        "Errno 28 outside /dev/shm",
        "look: df -h (and df -i) of that folder; make room, or move caches (HF_HOME, TMPDIR, TORCH_HOME)",
        "keep fewer checkpoints: save_total_limit in transformers",
    ),
    "Ray": _source(
        "host-memory",
        "Ray ended a worker: the node's host memory went over Ray's threshold",
        "Ray's memory monitor ends workers before the kernel would (95 % of the node by default)",
        "fewer tasks at a time: a larger num_cpus or memory= for each, or nodes with more memory",
        "RAY_memory_usage_threshold moves the limit; RAY_memory_monitor_refresh_ms=0 switches the monitor off",
    ),
    "Ray's object store": _source(
        "cap",
        "Ray's object store is full: objects in shared memory that are still referenced",
        "the store is 30 % of the node's memory by default, within /dev/shm",
        "del object references (ray.put results) that are no longer needed",
        "a larger store: ray.init(object_store_memory=...), and a larger /dev/shm",
    ),
    "accelerate": _source(
        "true-need",
        "accelerate halved the batch size down to zero: not even one row fits, or the error is another one",
        "find_executable_batch_size retries on out-of-memory errors; what a failed try leaves in memory stays",
        "make model and optimizer inside the decorated function, and call accelerator.free_memory() first in it",
        "look at the first error alone: call the function once with a fixed batch size",
    ),
    "detectron2": _source(
        "true-need",
        "the GPU was full and detectron2 goes on with this operation on the CPU",
        "retry_if_cuda_oom caught the error: slow, but right; mostly the matching of many boxes in one image",
        "fewer or smaller images per GPU: SOLVER.IMS_PER_BATCH, INPUT.MIN_SIZE_TRAIN",
        "a cap on the boxes of one image, which are matched with all anchors",
    ),
    "Triton's shared memory": _source(
        "cap",
        "a Triton kernel asks for more shared or tensor memory than a multiprocessor has; the GPU is not full",
        "blocks and stages were chosen for another GPU",
        "smaller block sizes or num_stages in the kernel's configuration",
        "another version of the library that has the kernel, for this GPU",
    ),
    "shared memory of workers": _source(
        "cap",
        "shared memory (/dev/shm) is used up; in containers it is 64 MB unless more is asked for",
        "DataLoader workers and collectives hand their data over through it",
        "start the container with more of it: docker run --ipc=host, or --shm-size=8g",
        "fewer workers, or DataLoader(num_workers=0)",
    ),
    "Errno 28": _source(
        "cap",
        "a file system is full: shared memory (/dev/shm) if a DataLoader worker says so, else a disk",
        "Errno 28 names no path here; `df -h` shows which one is full",
        "look: df -h /dev/shm, then docker run --ipc=host or --shm-size=8g, or fewer workers",
        "if it is a disk: make room where checkpoints, caches (HF_HOME) and TMPDIR are",
    ),
    "open files": _source(
        "cap",
        "the limit on open files is reached",
        "memory is not what ran out: tensors that DataLoader workers hand over hold a file descriptor each, and so do "
        "files and sockets that are not closed",
        "raise it: ulimit -n 65536",
        'or torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
}
LARGE_TENSORS: dict[str, str] = {
    "boxes": "fewer boxes at once: every box of an image is compared with every anchor. gpu_assign_thr=100 of mmdet's "
    "assigner does it on the CPU for full images; crop large images into tiles",
    "transducer": "the transducer's joint has B x T x U x vocabulary values: fused_batch_size=1 and fuse_loss_wer=True "
    "(NeMo), a pruned loss (k2), shorter audio, a smaller vocabulary",
}
"""Advice for tensors that are known to be large, by the place that makes them (`Facts.large_tensor`)."""

DIVISIBLE_TENSORS: dict[str, str] = {
    "logits": "logits over the vocabulary in pieces: a chunked loss head (F.linear_cross_entropy, Liger's kernels), of "
    "the rows that have a label only",
    "attention scores": 'no scores of all pairs: F.scaled_dot_product_attention, attn_implementation="sdpa"',
}
"""Advice for tensors that a training step need not have whole, by the place that makes them.

See `Facts.divisible_tensor`.
"""

INFERENCE: dict[str, tuple[str, ...]] = {
    "vLLM": (
        "a shorter max_model_len, fewer max_num_seqs, enforce_eager=True; a smaller gpu_memory_utilization if the "
        "weights were loaded",
        "tensor_parallel_size over more GPUs, or a quantized model, where the weights do not fit",
    ),
    "SGLang": (
        "a smaller --mem-fraction-static or --cuda-graph-max-bs (--disable-cuda-graph), if the weights were loaded",
        "--tp-size over more GPUs, or a quantized model, where the weights do not fit",
    ),
    "ComfyUI": SOURCES["ComfyUI's nodes"].actions,
    "Stable Diffusion web UI": SOURCES["Stable Diffusion web UI"].actions,
    "diffusers": (
        "pipe.enable_model_cpu_offload(), pipe.vae.enable_tiling(); weights in bfloat16 or quantized",
        "smaller images, fewer of them or fewer frames at once, under torch.inference_mode()",
    ),
    "a model": (
        "smaller or fewer inputs at a time: batch size, length, image size; under torch.inference_mode()",
        "weights in bfloat16 or quantized; parts of the model on other devices (accelerate's device_map)",
    ),
    "generation": (
        "shorter prompts and max_new_tokens, fewer sequences or beams: the KV cache grows with each token of each",
        'cache_implementation="offloaded" or "quantized", attn_implementation="sdpa"; weights in bfloat16 or quantized',
    ),
}
"""Advice where a program runs a model without training it, so that there is no step to plan."""
