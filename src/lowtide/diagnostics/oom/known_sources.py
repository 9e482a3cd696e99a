"""Programs that report or end a process for its memory in fixed words: what each message means, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Meaning of all messages of one program."""

    code: str
    claim: str
    evidence: str
    actions: tuple[str, ...]


_LESS_HOST_MEMORY = (
    "fewer DataLoader workers (num_workers), a smaller prefetch_factor, no copy of the data set per worker",
    "torch.load(..., mmap=True); checkpoints on one rank; no whole epoch of predictions in a list",
)

SOURCES: dict[str, Source] = {
    "Slurm": Source(
        code="host-memory",
        claim="Slurm ended the task: the job used more host memory than it had asked for",
        evidence="the limit is the job's --mem or --mem-per-cpu; the GPU's memory is not concerned",
        actions=(
            "ask for more: sbatch --mem=64G, or --mem=0 for the whole node; `seff JOBID` shows the peak",
            *_LESS_HOST_MEMORY,
        ),
    ),
    "PBS": Source(
        code="host-memory",
        claim="PBS ended the job: it used more host memory than it had asked for",
        evidence="the limit is the job's mem or vmem; the GPU's memory is not concerned",
        actions=("ask for more: qsub -l select=1:mem=64gb; `qstat -fx JOBID` shows the peak", *_LESS_HOST_MEMORY),
    ),
    "LSF": Source(
        code="host-memory",
        claim="LSF ended the job: it used more host memory than its limit",
        evidence="TERM_MEMLIMIT is the limit of bsub -M; the GPU's memory is not concerned",
        actions=(
            'ask for more: bsub -M 64GB -R "rusage[mem=64GB]"; `bhist -l JOBID` shows the peak',
            *_LESS_HOST_MEMORY,
        ),
    ),
    "SGE": Source(
        code="host-memory",
        claim="Grid Engine ended the job: it used more host memory than it had asked for",
        evidence="the limit is the job's h_vmem; the GPU's memory is not concerned",
        actions=("ask for more: qsub -l h_vmem=64G; `qacct -j JOBID` shows maxvmem", *_LESS_HOST_MEMORY),
    ),
    "AWS Batch": Source(
        code="host-memory",
        claim="AWS Batch ended the container: it reached the memory of its job definition",
        evidence="the kernel ends a container at its limit, whatever the instance has free",
        actions=(
            "raise MEMORY in resourceRequirements of the job definition, within the instance's memory",
            *_LESS_HOST_MEMORY,
        ),
    ),
    "Kubernetes": Source(
        code="host-memory",
        claim="the container was ended for its memory (OOMKilled): it reached its limit, or the node ran out",
        evidence="OOMKilled is the kernel's own verdict: host memory, not the GPU's",
        actions=(
            "raise resources.limits.memory of the container; `kubectl top pod` shows the usage before the end",
            "give /dev/shm an emptyDir of medium Memory: its pages count toward the limit",
        ),
    ),
    "Linux": Source(
        code="host-memory",
        claim="the kernel ended a process to get host memory back: the machine's, or the container's limit, is used up",
        evidence="the kernel's own message: host memory, not the GPU's",
        actions=(
            "dmesg names the process and its memory (anon-rss); raise the limit of the container if it has one",
            *_LESS_HOST_MEMORY,
        ),
    ),
    "DataLoader": Source(
        code="host-memory",
        claim="the kernel ended a DataLoader worker: host memory of the machine, or of the container, is used up",
        evidence="workers hold their own copies of what the data set touches, times prefetch_factor batches",
        actions=_LESS_HOST_MEMORY,
    ),
    "shells, torchrun and containers": Source(
        code="host-memory",
        claim="the system ended a process, most likely to get host memory back: the machine's or the container's",
        evidence="SIGKILL (exit code 137, or -9) leaves no reason; `dmesg | grep -i oom` says whether it was memory",
        actions=("look: dmesg | grep -i oom, or `kubectl describe pod` (Reason: OOMKilled)", *_LESS_HOST_MEMORY),
    ),
    "Colab": Source(
        code="host-memory",
        claim="the machine's RAM is used up: Colab ended the session",
        evidence="this is host memory; the GPU's is reported by PyTorch itself",
        actions=("load less at once: stream the data set, or a high-RAM runtime", *_LESS_HOST_MEMORY),
    ),
    "Kaggle": Source(
        code="host-memory",
        claim="the machine's RAM is used up: Kaggle restarted the notebook",
        evidence="this is host memory; the GPU's is reported by PyTorch itself",
        actions=("load less at once: stream the data set, a smaller dtype", *_LESS_HOST_MEMORY),
    ),
    "HTCondor": Source(
        code="host-memory",
        claim="HTCondor ended or held the job: it used more host memory than it had asked for",
        evidence="the limit is request_memory; the GPU's memory is not concerned",
        actions=("ask for more: request_memory = 64GB in the submit file", *_LESS_HOST_MEMORY),
    ),
    "Jupyter": Source(
        code="host-memory",
        claim="the notebook's kernel died, most likely because the machine's RAM is used up",
        evidence="out of host memory, a kernel ends without a traceback; crashes in libraries look the same",
        actions=(
            "watch RAM while it runs (free -h), or run the cell as a script: `dmesg | grep -i oom` then says why",
            *_LESS_HOST_MEMORY,
        ),
    ),
    "Windows": Source(
        code="host-memory",
        claim="Windows' commit limit is reached: the paging file is too small (error 1455)",
        evidence="each process that loads CUDA's libraries reserves gigabytes, and so does each DataLoader worker",
        actions=(
            "enlarge the paging file (System, Advanced, Performance, Virtual memory), or let Windows manage its size",
            "fewer DataLoader workers: num_workers=0 at first, and `if __name__ == '__main__':` around the script",
        ),
    ),
    "Ray": Source(
        code="host-memory",
        claim="Ray ended a worker: the node's host memory went over Ray's threshold",
        evidence="Ray's memory monitor ends workers before the kernel would (95 % of the node by default)",
        actions=(
            "fewer tasks at a time: a larger num_cpus or memory= for each, or nodes with more memory",
            "RAY_memory_usage_threshold moves the limit; RAY_memory_monitor_refresh_ms=0 switches the monitor off",
        ),
    ),
    "Ray's object store": Source(
        code="cap",
        claim="Ray's object store is full: objects in shared memory that are still referenced",
        evidence="the store is 30 % of the node's memory by default, within /dev/shm",
        actions=(
            "del object references (ray.put results) that are no longer needed",
            "a larger store: ray.init(object_store_memory=...), and a larger /dev/shm",
        ),
    ),
    "accelerate": Source(
        code="true-need",
        claim="accelerate halved the batch size down to zero: not even one row fits, or the error is another one",
        evidence="find_executable_batch_size retries on out-of-memory errors; what a failed try leaves in memory stays",
        actions=(
            "make model and optimizer inside the decorated function, and call accelerator.free_memory() first in it",
            "look at the first error alone: call the function once with a fixed batch size",
        ),
    ),
    "detectron2": Source(
        code="true-need",
        claim="the GPU was full and detectron2 goes on with this operation on the CPU",
        evidence="retry_if_cuda_oom caught the error: slow, but right; mostly the matching of many boxes in one image",
        actions=(
            "fewer or smaller images per GPU: SOLVER.IMS_PER_BATCH, INPUT.MIN_SIZE_TRAIN",
            "a cap on the boxes of one image, which are matched with all anchors",
        ),
    ),
    "Triton's shared memory": Source(
        code="cap",
        claim="a Triton kernel asks for more shared memory than a multiprocessor has; the GPU's memory is not full",
        evidence="blocks and stages were chosen for another GPU",
        actions=(
            "smaller block sizes or num_stages in the kernel's configuration",
            "another version of the library that has the kernel, for this GPU",
        ),
    ),
    "shared memory of workers": Source(
        code="cap",
        claim="shared memory (/dev/shm) is used up; in containers it is 64 MB unless more is asked for",
        evidence="DataLoader workers and collectives hand their data over through it",
        actions=(
            "start the container with more of it: docker run --ipc=host, or --shm-size=8g",
            "fewer workers, or DataLoader(num_workers=0)",
        ),
    ),
    "Errno 28": Source(
        code="cap",
        claim="a file system is full: shared memory (/dev/shm) if a DataLoader worker says so, else a disk",
        evidence="Errno 28 names no path here; `df -h` shows which one is full",
        actions=(
            "look: df -h /dev/shm, then docker run --ipc=host or --shm-size=8g, or fewer workers",
            "if it is a disk: make room where checkpoints, caches (HF_HOME) and TMPDIR are",
        ),
    ),
    "open files": Source(
        code="cap",
        claim="the limit on open files is reached: each tensor that a worker hands over holds a file descriptor",
        evidence="memory is not what ran out",
        actions=(
            "raise it: ulimit -n 65536",
            'or torch.multiprocessing.set_sharing_strategy("file_system")',
        ),
    ),
}
