"""Explanations of messages about exhausted host memory, from programs and systems: cause and remedies."""

from __future__ import annotations

from lowtide.diagnostics.oom.message_source import Source, source

_LESS_HOST_MEMORY = (
    "use fewer DataLoader workers (num_workers), a smaller prefetch_factor, no copy of the data set per worker",
    "use torch.load(..., mmap=True), read checkpoints on one rank, and keep no whole epoch of predictions in a list",
)


def make_host_source(claim: str, evidence: str, *actions: str) -> Source:
    """Return the explanation for a program that ran out of host memory. Its `actions` precede general advice."""
    return source("host-memory", claim, evidence, *actions, *_LESS_HOST_MEMORY)


HOST_SOURCES: dict[str, Source] = {
    "Slurm": make_host_source(
        "Slurm ended the task: the job used more host memory than it requested",
        "the limit is the job's --mem or --mem-per-cpu; GPU memory is not affected",
        "request more: sbatch --mem=64G, or --mem=0 for the whole node; `seff JOBID` shows the peak",
    ),
    "PBS": make_host_source(
        "PBS ended the job: it used more host memory than it requested",
        "the limit is the job's mem or vmem; GPU memory is not affected",
        "request more: qsub -l select=1:mem=64gb; `qstat -fx JOBID` shows the peak",
    ),
    "LSF": make_host_source(
        "LSF ended the job: it used more host memory than its limit",
        "TERM_MEMLIMIT is the limit of bsub -M; GPU memory is not affected",
        'request more: bsub -M 64GB -R "rusage[mem=64GB]"; `bhist -l JOBID` shows the peak',
    ),
    "SGE": make_host_source(
        "Grid Engine ended the job: it used more host memory than it requested",
        "the limit is the job's h_vmem; GPU memory is not affected",
        "request more: qsub -l h_vmem=64G; `qacct -j JOBID` shows maxvmem",
    ),
    "AWS Batch": make_host_source(
        "AWS Batch ended the container: it reached the memory of its job definition",
        "the kernel ends a container at its limit, even if the instance has memory free",
        "raise MEMORY in resourceRequirements of the job definition, within the instance's memory",
    ),
    "Kubernetes": source(
        "host-memory",
        "the container was ended for its memory (OOMKilled): it reached its limit, or the node ran out",
        "OOMKilled is the kernel's own verdict: host memory, not the GPU's",
        "raise resources.limits.memory of the container; `kubectl top pod` shows the usage before the end",
        "give /dev/shm an emptyDir of medium Memory: its pages count toward the limit",
    ),
    "Docker": make_host_source(
        "the container was ended for its memory (OOMKilled): it reached its limit, or the machine ran out",
        "OOMKilled is the kernel's own verdict: host memory, not the GPU's",
        "raise the limit: docker run --memory=32g, mem_limit in compose; Docker Desktop has one for all (Resources)",
    ),
    "WSL": make_host_source(
        "the kernel of WSL ended a process: the memory that WSL may use, half of Windows' by default, is used up",
        "the kernel's own message: host memory, not the GPU's",
        "set memory=24GB and swap=16GB under [wsl2] in %UserProfile%\\.wslconfig, then run wsl --shutdown",
    ),
    "Linux": make_host_source(
        "the kernel ended a process to get host memory back: the machine's, or the container's limit, is used up",
        "the kernel's own message: host memory, not the GPU's",
        "look in dmesg for the process and its memory (anon-rss); raise the limit of the container if it has one",
    ),
    "a control group": make_host_source(
        "the kernel ended a process: the limit of a container, a job or a unit (its control group) is reached",
        "the rest of the system may have memory free; this is host memory, not the GPU's",
        "look in dmesg for the process and its memory (anon-rss); raise the limit: docker run --memory, "
        "resources.limits.memory, MemoryMax=, Slurm's --mem",
    ),
    "memory.events": make_host_source(
        "the kernel ended processes of this control group (a container, a job, a unit) to get host memory back",
        "oom_kill counts them: the group's limit (memory.max) was reached, or the whole machine was full",
        "raise the group's limit (memory.max): docker run --memory, resources.limits.memory, MemoryMax=",
        "compare memory.peak with memory.max; if it stayed below, dmesg names the process that filled the machine",
    ),
    "a memory daemon": make_host_source(
        "a daemon (systemd-oomd, earlyoom) ended a process before the machine's memory was used up",
        "it goes by memory pressure or free memory, and takes the largest process: host memory, not the GPU's",
        "add memory or swap, or set another limit: ManagedOOMMemoryPressureLimit of the slice, earlyoom -m",
    ),
    "pinning": source(
        "pinned-memory",
        "the DataLoader's pin_memory thread has ended: it could not get pinned memory or a context on the GPU",
        "its own error is further up in the log, if it could write one",
        "try DataLoader(pin_memory=False) to see if that is all; then use a smaller prefetch_factor and fewer workers",
        "check with nvidia-smi that the GPU is not full, and raise the limit on locked memory (ulimit -l)",
    ),
    "DataLoader": make_host_source(
        "the kernel ended a DataLoader worker: host memory of the machine, or of the container, is used up",
        "workers hold their own copies of what the data set touches, times prefetch_factor batches",
    ),
    "shells, torchrun and containers": make_host_source(
        "the system ended a process, most likely to get host memory back: the machine's or the container's",
        "SIGKILL (exit code 137, or -9) leaves no reason; `dmesg | grep -i oom` says whether it was memory",
        "check dmesg | grep -i oom, or `kubectl describe pod` (Reason: OOMKilled)",
    ),
    "Colab": make_host_source(
        "the machine's RAM is used up: Colab ended the session",
        "this is host memory; the GPU's is reported by PyTorch itself",
        "load less at once: stream the data set, or a high-RAM runtime",
    ),
    "Kaggle": make_host_source(
        "the machine's RAM is used up: Kaggle restarted the notebook",
        "this is host memory; the GPU's is reported by PyTorch itself",
        "load less at once: stream the data set, a smaller dtype",
    ),
    "HTCondor": make_host_source(
        "HTCondor ended or held the job: it used more host memory than it requested",
        "the limit is request_memory; GPU memory is not affected",
        "request more: request_memory = 64GB in the submit file",
    ),
    "Jupyter": make_host_source(
        "the notebook's kernel died, most likely because the machine's RAM is used up",
        "out of host memory, a kernel ends without a traceback; crashes in libraries look the same",
        "watch RAM while it runs (free -h), or run the cell as a script: `dmesg | grep -i oom` then says why",
    ),
    "Windows": source(
        "host-memory",
        "Windows' commit limit is reached: the paging file is too small (errors 1455, 1450 and 8)",
        "each process that loads CUDA's libraries reserves gigabytes, and so does each DataLoader worker",
        "enlarge the paging file (System, Advanced, Performance, Virtual memory), or let Windows manage its size",
        "use fewer DataLoader workers: num_workers=0 at first, and `if __name__ == '__main__':` around the script",
    ),
    "Kubernetes, the node": make_host_source(
        "the node ran low on host memory: Kubernetes evicted a pod, or the kernel ended one of its processes",
        "both take the pod that uses most beyond its resources.requests.memory; GPU memory is not affected",
        "set resources.requests.memory to what the pod needs, and the limit to the same: such nodes are chosen",
        "give emptyDir volumes of medium Memory a sizeLimit: their pages count",
    ),
    "SageMaker": make_host_source(
        "the instance's host memory is used up: SageMaker ended the job",
        "this is the instance's main memory, not the GPU's",
        "use an instance type with more memory, or input by streaming (FastFile, Pipe mode)",
    ),
    "Dask's warnings": source(
        "host-memory",
        "a worker of Dask nears its memory limit and pauses, or holds memory that Dask does not count: a warning",
        "at 80 % of memory_limit a worker pauses, at 95 % the nanny ends it",
        "use smaller partitions, or fewer threads a worker; raise memory_limit if the machine has room",
        "return freed memory to the system: MALLOC_TRIM_THRESHOLD_=65536 (Linux)",
    ),
    "Dask": source(
        "host-memory",
        "Dask's nanny restarted a worker: it used more host memory than the worker's limit",
        "the limit is memory_limit of the worker: by default its share of the machine",
        "use smaller partitions, or fewer threads a worker; a larger memory_limit if the machine has room",
        "do not collect large results on one worker: persist() and write them out",
    ),
    "a compiler": source(
        "host-memory",
        "the system ended a compiler to get host memory back: too many compile jobs run at once",
        "extensions such as flash-attn and DeepSpeed's ops start one job for each core, of some GiB each",
        "set MAX_JOBS=2 before pip install or the first use",
        "or a prebuilt wheel for this torch and CUDA",
    ),
    "a build of Docker": source(
        "host-memory",
        "the machine that builds the image has too little memory for a step",
        "with Docker Desktop that machine is a virtual one, with a limit of its own",
        "give the builder more memory: Docker Desktop, Settings, Resources; --memory of docker build",
        "run fewer jobs in the step: MAX_JOBS=2, pip install --no-cache-dir",
    ),
    "llama.cpp on the host": source(
        "host-memory",
        "llama.cpp could not allocate host memory for weights, KV cache or scratch memory that is not on a GPU",
        "CPU and host buffers are main memory; GPU memory is not affected",
        "use a smaller or further quantized model, a shorter context (-c), or more layers on the GPU (-ngl)",
        "keep memory mapping on (no --no-mmap, no --mlock): mapped weights need no memory of their own",
    ),
    "Ollama's runner on the host": source(
        "host-memory",
        "Ollama's runner could not allocate host memory for weights, KV cache or scratch memory that is not on a GPU",
        "CPU and host buffers are main memory; GPU memory is not affected",
        "use a smaller or further quantized model, a smaller num_ctx, or more layers on the GPU (num_gpu)",
        "free RAM: OLLAMA_MAX_LOADED_MODELS=1, use_mmap=true, other programs, a container's limit",
    ),
    "pinned memory of llama.cpp": source(
        "pinned-memory",
        "llama.cpp could not pin host memory and continues with pageable memory: slower copies, same results",
        "pinned memory is limited by the driver and by ulimit -l, regardless of free memory",
        "raise the limit on locked memory (ulimit -l unlimited; under WSL more memory in .wslconfig)",
        "or set GGML_CUDA_NO_PINNED=1, which uses no pinned memory and prints no warning",
    ),
    "GitHub Actions": source(
        "host-memory",
        "the runner stopped answering, most likely because the job took all its memory or all its cores",
        "GitHub cannot tell which: a hosted Linux runner has 7 to 16 GB of memory and no limit for a job",
        "print the memory while the job runs (free -h in a loop), or run it in a container with --memory",
        "use fewer processes at a time (pytest -n, MAX_JOBS), a smaller model or data set, or a larger runner",
    ),
    "Julia": source(
        "host-memory",
        "Julia could not allocate host memory for an array",
        "its OutOfMemoryError is about main memory; for the GPU there is another message",
        "print the array's size: one dimension may be wrong; then blocks, views, or a smaller element type",
        "set --heap-size-hint, so that Julia collects garbage earlier; free -h shows the machine's memory",
    ),
    "TensorFlow on the host": source(
        "host-memory",
        "TensorFlow asked for main memory and the machine had none left; GPU memory is not affected",
        "the tensor was to be on the CPU",
        "make no whole data set one tensor: use tf.data from files, in batches",
        "use smaller batches, a smaller dtype, fewer prefetched batches and parallel calls",
    ),
    "Ollama": source(
        "host-memory",
        "the machine has less free RAM than Ollama estimates for the model",
        "both numbers are in the message; layers that are not on a GPU count as RAM",
        "use a smaller or further quantized model, or a smaller num_ctx",
        "use more layers on the GPU (num_gpu), or free RAM: other programs, a container's limit",
    ),
    "YARN": source(
        "host-memory",
        "YARN ended a container of Spark: it used more host memory than its limit",
        "memory outside Java's heap counts: Python workers and their tensors are there",
        "use a larger spark.executor.memoryOverhead, or spark.executor.pyspark.memory",
        "use fewer cores an executor, smaller partitions",
    ),
    "Spark's workers": source(
        "host-memory",
        "Spark lost an executor or one of its Python workers, most likely because host memory ran out",
        "Python workers and their tensors are outside Java's heap, and count toward the container's limit",
        "use a larger spark.executor.memoryOverhead, or spark.executor.pyspark.memory",
        "use fewer cores an executor, smaller partitions, a smaller spark.sql.execution.arrow.maxRecordsPerBatch",
        "look in the executor's own log: a crash in a library looks the same",
    ),
    "Spark's driver": source(
        "host-memory",
        "Spark's driver has ended, most likely because the driver's host memory ran out",
        "collect() and toPandas() bring whole tables to it, and Python models in a notebook are there, too",
        "collect less: aggregate, sample, or write to files; or a driver with more memory",
        "look in the driver's log (stderr, events of the cluster): other failures look the same",
    ),
    "Java's start": source(
        "host-memory",
        "the machine has too little memory left for Java's heap or its own tables",
        "Java commits its initial heap at once; ulimit -v and the container's limit count",
        "lower the heap: -Xmx and -Xms, spark.driver.memory, spark.executor.memory",
        "check free -h, and end what holds the memory",
    ),
    "Java's heap": source(
        "host-memory",
        "Java's heap is full: its limit, not the machine's memory",
        "Spark's driver and executors run in Java, and collect results there",
        "use a larger heap: -Xmx, spark.driver.memory or spark.executor.memory",
        "collect less: no toPandas() or collect() of a whole table",
    ),
    "macOS": make_host_source(
        "macOS ended a process, or asks to end some, because its memory and swap are used up",
        "on Apple silicon the GPU's memory is part of it",
        "look in Activity Monitor which processes hold memory; free disk space for swap",
        "use smaller batches or a smaller model; lower PYTORCH_MPS_HIGH_ and LOW_WATERMARK_RATIO make torch fail first",
    ),
    "Dask's workers": source(
        "host-memory",
        "workers of Dask died while they ran one task, most likely because host memory ran out",
        "the worker's own log says why it ended",
        "look in the workers' logs; a larger memory_limit, or fewer threads a worker",
        "use smaller partitions: the task of one has to fit into a worker",
    ),
    "pools of processes": source(
        "host-memory",
        "a worker process ended without an error message, most likely because host memory ran out",
        "the kernel ends the largest process; a crash in a library looks the same",
        "use fewer workers (num_proc, n_jobs, max_workers, nnUNet_n_proc_DA): each has its own copy of what it touches",
        "use smaller pieces: writer_batch_size of datasets' map; `dmesg | grep -i oom` tells if it was memory",
    ),
    "gunicorn": source(
        "host-memory",
        "a worker of the server was ended, most likely because host memory ran out",
        "each worker loads its own model; gunicorn sends SIGKILL after a timeout, too",
        "use one worker with threads, or preload_app with the model loaded before the fork",
        "use a larger limit of the container, and a longer --timeout if no memory was missing (dmesg | grep -i oom)",
    ),
    "fork": source(
        "host-memory",
        "the system refused a new process: too little memory is left to promise it a copy of its parent's",
        "a fork needs no memory at once, but the kernel must be able to commit it",
        "check free -h and the container's limit; end what holds the memory, or add swap",
        "use fewer DataLoader workers, started before large arrays are made; or vm.overcommit_memory=1 on your machine",
    ),
    "a service's limit": make_host_source(
        "the service ended the program at its memory limit: main memory, not the GPU's",
        "the service's own message",
        "use a larger memory size for the job, function or machine",
    ),
    "libraries on the host": source(
        "host-memory",
        "a library could not allocate host memory: the machine's is used up, or a limit is reached",
        "it allocates from the system directly; GPU memory is not affected",
        "check free -h, ulimit -v, and the container's limit",
        "load less at once: smaller images or tables, fewer processes with a copy each",
    ),
    "Ray": source(
        "host-memory",
        "Ray ended a worker: the node's host memory went over Ray's threshold",
        "Ray's memory monitor ends workers before the kernel would (95 % of the node by default)",
        "use fewer tasks at a time: a larger num_cpus or memory= for each, or nodes with more memory",
        "move the limit with RAY_memory_usage_threshold, or switch the monitor off: RAY_memory_monitor_refresh_ms=0",
    ),
}
"""Explanations by the name in `MessageHead.form`."""
