"""Beginnings of messages about exhausted host memory, and about processes that were killed because of it."""

from __future__ import annotations

import re

from lowtide.diagnostics.oom.message_head import MessageHead, head

_SHELLS = "shells, torchrun and containers"
_SHM = "shared memory of workers"
_KILLED = "Getötet|Ucciso|Morto|Убито|已杀死|已殺死|已砍掉|強制終了|죽었음|Processus arrêté|Terminado (killed)"
"""A shell's word for a process that was killed by SIGKILL, in several languages."""
_ENOMEM = (
    "(?:Cannot allocate memory|Nicht genügend Hauptspeicher|Kann (?:nicht genügend )?Speicher nicht"
    "|Impossible d'allouer de la mémoire|No se pudo asignar memoria|Impossibile allocare memoria"
    "|Não foi possível alocar memória|Невозможно выделить память|无法分配内存|無法配置記憶體|メモリー?を確保できません"
    "|메모리를 할당할 수 없)"
)
"""The system's text for error number 12, in several languages."""

HOST_HEADS: tuple[MessageHead, ...] = (
    # host memory of programs beside torch
    head(
        "killed by YARN", r"[Cc]ontainer killed by YARN for exceeding (?:physical |virtual )?memory", "system", "YARN"
    ),
    head(
        "java.lang.OutOfMemoryError",
        r"java\.lang\.OutOfMemoryError: (?:Java heap|GC overhead)",
        "system",
        "Java's heap",
    ),
    head(
        "java.lang.OutOfMemoryError",
        r"java\.lang\.OutOfMemoryError: (?:Metaspace|Compressed class|(?:Cannot reserve .{1,60})?[Dd]irect buffer)",
        "system",
        "Java beside its heap",
    ),
    head(
        "avaScript heap out|ERR_WORKER_OUT_OF_MEMORY",
        r"JavaScript heap out of memory|ERR_WORKER_OUT_OF_MEMORY",
        "system",
        "Node.js",
    ),
    head(
        "os::commit_memory|insufficient memory for the Java",
        r"os::commit_memory\(0x[0-9a-f]{1,16}, \d{1,20}, \d\) failed|There is insufficient memory for the Java Runtime",
        "system",
        "Java's start",
    ),
    head("maxResultSize", r"is bigger than .{0,40}spark\.driver\.maxResultSize", "system", "Spark's results"),
    head(
        "RangeError: ",
        r"RangeError: (?:Array buffer allocation failed|WebAssembly\.\w{1,20}\(\): could not allocate memory)",
        "system",
        "JavaScript in a browser",
    ),
    head("Out of Memory Error: ", r"Out of Memory Error: (?:failed to|could not) \w{1,20}", "system", "DuckDB"),
    head(
        "abruptly|unexpectedly terminated|background ",
        r"One of the subprocesses has abruptly died during map|A process in the process pool was terminated abruptly"
        r"|[Oo]ne or more background workers are no longer alive|[Ss]ome background worker is 6 feet under"
        # where the message states how the workers ended, one must have been killed: a crash is not a lack of memory
        r"|A worker process managed by the executor was unexpectedly terminated"
        r"(?!.{0,400}The exit codes? of the workers? (?:are|is) \{(?![^}]{0,400}SIGKILL)[^}]{0,400}SIG)",
        "system",
        "pools of processes",
        certain=False,
    ),
    head(
        "alloc of size|C error: out|runtime: out of|vector of size",
        r"ArrowMemoryError: (?:m|re)alloc of size \d|C error: out of memory|fatal error: runtime: out of memory"
        r"|cannot allocate vector of size \d",
        "system",
        "libraries on the host",
    ),
    head(
        "worker exited unexpectedly|containers exceeding thresholds|possible container OOM|ExecutorLostFailure",
        r"Python worker exited unexpectedly \(crashed\)|Likely due to containers exceeding thresholds"
        r"|exited with exit code 137\(SIGKILL, possible container OOM\)"
        r"|ExecutorLostFailure \(.{1,400}Exit (?:status|code)(?: is|:) 137",
        "system",
        "Spark's workers",
        certain=False,
    ),
    head(
        "driver has stopped unexpectedly",
        r"[Ss]park driver has stopped unexpectedly and is restarting",
        "system",
        "Spark's driver",
        certain=False,
    ),
    head("sent SIGKILL!", r"Worker \(pid:\d{1,10}\) was sent SIGKILL!", "system", "gunicorn", certain=False),
    head("fork: ", rf"\bfork: (?:retry: )?{_ENOMEM}", "system", "fork"),
    # a traceback of `subprocess`, whose last frame forks
    head("[Errno 12]", r"\b_fork_exec\(.{0,500}?OSError: \[Errno 12\]", "system", "fork"),
    head(
        "start new thread|native thread|emporarily unavailable|for OMP thread",
        r"can't start new thread|System unable to allocate necessary resources for OMP thread"
        r"|java\.lang\.OutOfMemoryError: unable to create (?:new )?native thread"
        r"|(?:pthread_create failed.{0,60}|Thread creation failed|\bfork(?:: retry)?): Resource temporarily unavail",
        "system",
        "threads and processes",
    ),
    # services that end a program at its memory limit
    head(
        "out-of-memory and exited|emory limit|emory quota|Max Memory Used|an out of|over its resource|OOM killed",
        r"ran out-of-memory and exited with|Ran out of memory \(used over \d{1,6}[KMG]B\) while running your code"
        r"|app has gone over its resource limits|Process appears to have been OOM killed"
        r"|Memory limit of [\d.]{1,20} ?[KMG]i?B exceeded"
        r"|Container (?:'[^'\n]{1,80}' exceeded|exceeded its) memory limit|Error: memory limit exceeded"
        r"|Memory limit exceeded \(\d{1,10}[KMG]i?\)|Error R1[45] \(Memory quota|hit its memory limit"
        r"|\b(?:[Mm]achine|[Nn]otebook|[Ss]tudio|[Ss]ession|[Ii]nstance|[Ww]orkspace|[Cc]ontainer|[Kk]ernel) ran out "
        r"of (?:memory|RAM)\b"
        r"|Memory Size: (\d{1,6}) MB Max Memory Used: \1 MB",
        "system",
        "a service's limit",
    ),
    head("workers died while", r"all those workers died while running it", "system", "Dask's workers", certain=False),
    head(
        "Pausing worker|Unmanaged memory use",
        r"Worker is at \d{1,3}% memory usage\. Pausing worker|Unmanaged memory use is high",
        "system",
        "Dask's warnings",
    ),
    head(
        "memory allocation of|Memory exhausted!|Insufficient memory|Fail to alloc memory|malloc failed|<jemalloc>"
        "|still failed after",
        r"memory allocation of \d{1,20} bytes failed|\[LightGBM\] \[Fatal\] Memory exhausted!"
        r"|\(-4:Insufficient memory\) Failed to allocate \d{1,20} bytes"
        r"|Fail to alloc memory of \d{1,20} size, error code is 12"
        r"|Out of memory, malloc failed \(tried to allocate \d{1,20} bytes\)|<jemalloc>: .{0,40}: out of memory"
        r"|Memory allocation still failed after \d{1,4} retries, giving up",
        "system",
        "libraries on the host",
    ),
    head(
        "insufficient system resources",
        r"Model loading (?:was stopped|aborted) due to insufficient system resources",
        "system",
        "LM Studio",
    ),
    head(
        "too many memory regions",
        r"you tried to allocate too many memory regions",
        "system",
        "regions of OpenBLAS",
    ),
    head("static TLS block", r"cannot allocate memory in static TLS block", "system", "thread-local memory"),
    head(
        "did not complete successfully",
        r"failed to solve: (?:ResourceExhausted: )?process .{1,600}? did not complete successfully: "
        r"cannot allocate memory",
        "system",
        "a build of Docker",
    ),
    # host memory
    head(
        "array is too big|size calculation|maybe an overflow|Maximum allowed",
        r"array is too big; `arr\.size|Storage size calculation overflowed|invalid memory size -- maybe an overflow"
        r"|Maximum allowed (?:size|dimension) exceeded",
        "numpy",
        "a size that overflows",
    ),
    head(
        "mach_vm_map(size=|== (nil)",
        r"malloc: (?:can't allocate region :)?\*{3} mach_vm_map\(size=\d{1,20}"
        r"|tcmalloc: large alloc \d{1,20} bytes == \(nil\)",
        "cpu",
        "other allocators",
    ),
    head(
        "for an array with shape",
        r"Unable to allocate \d[\d.]{0,40} (?:bytes|[KMGTPE]iB) for an array with shape",
        "numpy",
        "NumPy 1.17 and later",
    ),
    head("allocate array with shape", r"Unable to allocate array with shape", "numpy", "NumPy 1.16"),
    head(
        "unable to mmap",
        r"unable to mmap \d{1,40} bytes from file(?: <[^>]{0,4096}>: Cannot allocate memory)?",
        "cpu",
        "torch 1.0 and later",
    ),
    head(
        "Too many open files",
        r"unable to open shared memory object .{0,300}Too many open files"
        r"|Too many open files\. Communication with the workers",
        "system",
        "open files",
    ),
    head("Too many open files", r"\[Errno 24\] Too many open files", "system", "open files"),
    head("received 0 items", r"received 0 items of ancdata", "system", "open files"),
    head(
        "DataLoader worker",
        r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: Bus error",
        "shared memory",
        _SHM,
    ),
    head(
        "bus error|Bus error|unable to write to file </torch_",
        r"Unexpected bus error encountered in worker|unable to write to file </torch_\w{1,60}>(?!:)",
        "shared memory",
        _SHM,
    ),
    head(
        "Bus error (core|code|(SIGBUS)",
        r"\bBus error \(core dumped\)|\b(?:return|exit) ?code *[:=]? *(?:-7|135)\b|Signal 7 \(SIGBUS\)",
        "shared memory",
        _SHM,
        certain=False,
    ),
    head(
        "No space left",
        r"unable to (?:write to|open|allocate|resize) (?:file|shared memory)[^:]{0,300}: No space left",
        "shared memory",
        _SHM,
    ),
    head(
        "No space left",
        r"\[Errno 28\] No space left on device: '/?(?:dev/shm|pym-|psm_|torch_)",
        "shared memory",
        _SHM,
    ),
    head(
        "No space left|StorageFull|OutOfDiskError|ocal disk is full|ephemeral",
        r"\[Errno 28\] No space left on device: '(?!/?dev/shm)|No space left on device \[Op:|kind: StorageFull"
        r"|OutOfDiskError|[Ll]ocal disk is full\b|low on resource: ephemeral-storage"
        r"|ephemeral local storage usage exceeds",
        "disk",
        "a full disk",
    ),
    head("uota exceeded|[Errno 122]", r"\[Errno 122\]|\bDisk quota exceeded", "disk", "a quota"),
    head(
        "PytorchStreamWriter failed|unexpected pos",
        r"PytorchStreamWriter failed writing file|inline_container\.cc:\d{1,6}\] ?\.? ?unexpected pos \d{1,20} vs \d",
        "disk",
        "a checkpoint cut off",
        certain=False,
    ),
    head("No space left", r"(?:\[Errno 28\] )?No space left on device", "shared memory", "Errno 28", certain=False),
    head(
        "space for /dev/shm|more available memory",
        r"not enough space for /dev/shm/|check that /dev/shm .{0,60}has more available memory",
        "shared memory",
        _SHM,
    ),
    head("shared memory segment", r"[Ee]rror while creating shared memory segment", "shared memory", _SHM),
    head("/dev/shm/nccl", r"failed to extend /dev/shm/nccl", "shared memory", _SHM),
    head("shared memory(shm)", r"unable to allocate shared memory\(shm\) for file", "shared memory", _SHM),
    head("Pin memory thread", r"Pin memory thread exited unexpectedly(?!\")", "system", "pinning", certain=False),
    head(
        "DataLoader worker", r"DataLoader worker \(pid[^)]{0,80}\) is killed by signal: Killed", "system", "DataLoader"
    ),
    head(
        "exited unexpectedly",
        r"DataLoader worker \(pid.{0,100}\) exited unexpectedly",
        "system",
        "DataLoader",
        certain=False,
    ),
    head(
        "virtual memory condition|shared file mapping|0xC00000|0xc00000|0xC000012|0xc000012|os error 1455|"
        "WinError|aging file|file di paging|pagina|Auslagerungsdatei|页面文件|ページング|페이징|подкачки",
        r"diagnosed a low virtual memory condition|shared file mapping: .{1,200}, error code: <(?:1455|1450|8)>"
        r"|\b0x[Cc]000(?:0017|012[Dd])\b"
        r"|\[?WinError (?:1455|1450|8)\]|\bos error 1455\b|WinError 1455|[Pp]aging file is too small"
        r"|Auslagerungsdatei ist zu klein|fichier de pagination est insuffisant|archivo de paginación es demasiado"
        r"|arquivo de paginação é muito|file di paging|页面文件太小|ページング ?ファイルが小さ|페이징 파일이 너무"
        r"|[Фф]айл подкачки слишком",
        "system",
        "Windows",
    ),
    # programs that end a process for its memory, or report its end
    head("microsoft-standard-WSL", r"invoked oom-killer: .{1,600}?microsoft-standard-WSL", "system", "WSL"),
    head("System OOM", r"System OOM encountered, victim process: \S", "system", "Kubernetes, the node"),
    head("MemoryPressure", r"node had condition: \[[^\]]{0,60}MemoryPressure", "system", "Kubernetes, the node"),
    head("low on resource", r"node was low on resource: memory", "system", "Kubernetes, the node"),
    head(
        "lost communication|shutdown signal",
        r"(?:hosted|self-hosted) runner(?:: .{1,100}?)? lost communication with the server"
        r"|runner has received a shutdown signal.{0,400}?exit code 137",
        "system",
        "GitHub Actions",
        certain=False,
    ),
    head("OutOfMemoryError()", r"\bOutOfMemoryError\(\)", "system", "Julia"),
    head("instance type with more memory", r"use an instance type with more memory", "system", "SageMaker"),
    head("% memory budget", r"[Ww]orker .{0,80}exceeded \d{1,3}% memory budget", "system", "Dask"),
    head(
        "terminated program|signal 9|(program |out of memory|error C1060|memory exhausted",
        r"Killed signal terminated program \w{1,40}|'\w{1,40}' died due to signal 9\b|\bld terminated with signal 9\b"
        r"|internal compiler error: Killed \(program \w|\bcc1\w{0,8}: out of memory allocating"
        r"|LLVM ERROR: out of memory|fatal error C1060: compiler is out of heap|final link failed: memory exhausted",
        "system",
        "a compiler",
    ),
    head("ninja: build", r"\bKilled ninja: build stopped", "system", "a compiler", certain=False),
    head("OOMKilled", r"\"Status\": \"exited\".{0,200}?\"OOMKilled\": true\b", "system", "Docker"),
    head("OOMKilled", r"\bOOMKilled\b(?!\W{1,6}(?:[Ff]alse|0|null|None))", "system", "Kubernetes"),
    head("all available RAM", r"crashed after using all available RAM", "system", "Colab"),
    head(
        "tried to allocate more memory", r"notebook tried to allocate more memory than is available", "system", "Kaggle"
    ),
    head(
        "appears to have died|ernel crashed while|ernel died|Dead kernel|DeadKernel|KernelRestarter|is unresponsive",
        r"[Kk]ernel (?:for .{1,200}? )?(?:appears to have died|crashed while executing|died unexpectedly"
        r"|died with exit code|died, restarting)|Dead kernel|DeadKernelError|KernelRestarter: restarting kernel"
        r"|Python kernel is unresponsive",
        "system",
        "Jupyter",
        certain=False,
    ),
    head(
        "slurmstepd|srun:|OUT_OF_ME|exceeded",
        r"slurmstepd: error: .{0,120}oom[-_ ]kill|srun: error: .{0,120}: Out Of Memory|\bOUT_OF_ME(?:MORY|\+)"
        r"|slurmstepd: error: .{0,120}[Ee]xceeded (?:job |step |virtual )?memory limit",
        "system",
        "Slurm",
    ),
    head(
        "PBS: job killed|mem limit reached",
        r"PBS: job killed: (?:p?v?mem|vmem)\b|exceeded its memory allocation: cgroup mem",
        "system",
        "PBS",
    ),
    head("TERM_MEMLIMIT", r"TERM_MEMLIMIT", "system", "LSF"),
    head("h_vmem", r"exceeds? job (?:hard|soft) limit .h_vmem", "system", "SGE"),
    head(
        "assumedly after job",
        r"failed assumedly after job because: job \S{1,40} died through signal KILL",
        "system",
        "SGE",
        certain=False,
    ),
    head("over memory limit|over cgroup", r"Job has gone over (?:cgroup )?memory limit", "system", "HTCondor"),
    head("exceeded request_memory", r"memory usage exceeded request_memory", "system", "HTCondor"),
    head("Container killed due", r"Container killed due to memory usage", "system", "AWS Batch"),
    head(
        "running low on memory|due to memory pressure",
        r"killed due to (?:the node running low on memory|memory pressure)",
        "system",
        "Ray",
    ),
    head("ObjectStoreFull|object store", r"ObjectStoreFullError", "shared memory", "Ray's object store"),
    head(
        "No executable batch size", r"No executable batch size found, reached zero", "cuda", "accelerate", certain=False
    ),
    head("due to CUDA OOM", r"to CPU due to CUDA OOM", "cuda", "detectron2"),
    head("emory cgroup out of", r"[Mm]emory cgroup out of memory", "system", "a control group"),
    head("ut of memory", r"[Oo]ut of memory: Killed? process \d", "system", "Linux"),
    head(
        "oom-kill|oom_kill|OOM Killed|OOM killed|OOM-killed|oom_reaper: ",
        r"oom-kill|oom_kill event|OOM [Kk]illed|OOM-killed|oom_reaper: reaped process",
        "system",
        "Linux",
    ),
    head("systemd-oomd", r"systemd-oomd.{0,40}: Killed .{1,300}? due to memory", "system", "a memory daemon"),
    head(
        "memorystatus|low swap: killing|application memory",
        r"memorystatus: killing.{0,40} (?:process|pid) |low swap: killing .{0,60} pid \d"
        r"|system has run out of application memory",
        "system",
        "macOS",
    ),
    head("oom_kill ", r"\boom_kill[ =:]{1,3}[1-9]\d{0,9}\b", "system", "memory.events"),
    head("by the OOM killer", r"killed by the OOM killer", "system", "Linux"),
    head("sending SIG", r"earlyoom.{0,40}: sending SIG(?:TERM|KILL) to process", "system", "a memory daemon"),
    head(
        "xit|rror 137|return code|status code|returncode|statuscode|SIGKILL|illed|signal 9|status=9/KILL|SIGNAL: 9",
        r"[Ee]xit(?:ed with)?(?: status| ?_?[Cc]ode)?\"?[:=]* *[('\"]?137\b|[Ee]rror 137\b"
        r"|\b[Ee]xit ?_?[Cc]ode\"? *[:=]? *-9\b|Signal 9 \(SIGKILL\)|Signals\.SIGKILL|(?:return|status) code:? 137\b"
        r"|(?:return|status|exit) ?code *[:=]? *-9\b|non-zero exit \(137\)|\bExited \(137\)|\bSIGKILL\b"
        r"|(?:terminated|killed) by signal 9\b|exited on signal 9\b|signal: killed\b|Received \"killed\" signal"
        r"|(?:^| )Killed$|\b\d{1,40} Killed\b|zsh: killed\b|\bKilled: 9\b|\[\d{1,4}\] (?:[+-] )?\d{2,10} killed \S"
        r"|code=killed, status=9/KILL|KILLED BY SIGNAL: 9\b",
        "system",
        _SHELLS,
        certain=False,
    ),
    head(
        "mlock|ibv_reg|RLIMIT_MEMLOCK",
        r"(?:failed to mlock|\bmlock(?:all)? failed|ibv_(?:reg|create)_\w{1,20} failed)"
        r"[^\n]{0,100}Cannot allocate memory",
        "system",
        "locked memory",
    ),
    head(
        _KILLED,
        rf"(?:^| \d{{1,9}} )(?:{'|'.join(map(re.escape, _KILLED.split('|')))})(?=$| )",
        "system",
        _SHELLS,
        certain=False,
    ),
    head("[Errno 12]", rf"\[Errno 12\](?: {_ENOMEM})?", "cpu", "the operating system"),
    head("annot allocate memory", r"\b[Cc]annot allocate memory\b", "cpu", "the operating system"),
    head(
        "std::bad_alloc|: bad allocation",
        r"std::bad_alloc(?!: (?:out_of_memory: )?(?:CUDA|RMM|cuda))|: bad allocation\b",
        "cpu",
        "C++",
    ),
    head(
        "MemoryError",
        r"\bMemoryError\b(?!: (?:Unable to allocate|std::bad_alloc|cuMem|Error allocating \d))",
        "cpu",
        "Python",
    ),
)
