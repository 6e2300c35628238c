"""The rules that look for words in a job's log: NVIDIA's, torch's, Slurm's and the kernel's."""

from __future__ import annotations

from launcher.failures.rule import Rule

# A broken machine, which whoever comes next would meet again.
HARDWARE = (
    Rule(
        "gpu_lost",
        "log",
        "exclude",
        "line",
        r"Xid \(PCI:[^)]*\): 79[ ,]|[Ff]allen off the bus|GPU is lost"
        r"|Unable to determine the device handle for GPU",
        "a GPU was lost (Xid 79: it fell off the bus)",
        "tell the administrators: the node has to be restarted",
    ),
    Rule(
        "gpu_memory",
        "log",
        "exclude",
        "line",
        r"uncorrectable ECC error|Xid \(PCI:[^)]*\): (48|64|95|140)[ ,]|ECC page retirement or row remap",
        "the memory of a GPU has an error that cannot be corrected (ECC)",
        "tell the administrators: the GPU has to be reset, and exchanged if it happens again",
    ),
    Rule(
        "nvlink",
        "log",
        "exclude",
        "line",
        r"uncorrectable NVLink error|Xid \(PCI:[^)]*\): (74|14[4-9]|150)[ ,]"
        r"|Invalid access of peer GPU memory over nvlink",
        "the connection between GPUs of a node failed (NVLink)",
        "tell the administrators",
    ),
    Rule(
        "gpu_driver",
        "log",
        "exclude",
        "line",
        r"Xid \(PCI:[^)]*\): (62|119|120)[ ,]|CUDA error: system not yet initialized"
        r"|CUDA-capable device\(s\) is/are busy or unavailable",
        "the GPUs of a node, or their driver, do not answer",
        "tell the administrators: nvidia-smi on the node, and its fabric manager",
    ),
    Rule(
        "ib_port",
        "log",
        "exclude",
        "line",
        r"NET/IB ?: .*[Gg]ot async (fatal )?event ?:? *(port error|local catastrophic error|device fatal)",
        "a network port of a node failed (InfiniBand)",
        "tell the administrators: ibstat on the node",
    ),
    Rule(
        "node_failed",
        "log",
        "exclude",
        "line",
        r"^srun: error: Node failure on [^ ]",
        "a node of it failed",
    ),
    # A notice of a node that lives, which it names: another one failed.
    Rule("node_failed", "log", "exclude", "down", r"DUE TO NODE( [^ ]+)? FAILURE", "a node of it failed"),
)

# What went wrong in its tasks; a chain tries again, as long as it gets on.
TASKS = (
    Rule(
        "gpu_out_of_memory",
        "log",
        "continue",
        "-",
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU had no memory left",
        "a smaller micro_batch_size, more parallelism or activation recomputation: `slipway check`",
    ),
    Rule(
        "out_of_memory",
        "log",
        "continue",
        "-",
        r"[Dd]etected [0-9]+ oom[_-]kill event|: tasks? [0-9,-]+: Out Of Memory"
        r"|[Mm]emory cgroup out of memory|DataLoader worker .* is killed by signal: Killed",
        "a node had no memory left for it",
        "ask for more (cluster.mem), or use less: fewer data workers",
    ),
    Rule(
        "disk_full",
        "log",
        "continue",
        "-",
        r"No space left on device|Disk quota exceeded",
        "a file system was full",
        "make room; older checkpoints go by exp_manager.checkpoint_callback_params.save_top_k",
    ),
    Rule(
        "import_error",
        "log",
        "continue",
        "-",
        r"ModuleNotFoundError: |ImportError: |error while loading shared libraries",
        "a library was missing in its Python",
        "cluster.python or container: `slipway check` asks the interpreter what it has",
    ),
    Rule(
        "file_system",
        "log",
        "continue",
        "-",
        r"Stale file handle|Input/output error|Transport endpoint is not connected",
        "a file system failed",
        "if it happens again, tell the administrators",
    ),
    Rule(
        "container",
        "log",
        "continue",
        "-",
        r"error: pyxis: |enroot-[a-z]+: .*(ERROR|error)",
        "the container could not be started",
        "is the image there, and whole? The line after `pyxis:` in the log says what is missing",
    ),
    Rule(
        "network",
        "log",
        "continue",
        "-",
        r"NET/IB ?: [Gg]ot completion .*(status|error)|NET/Socket ?: .*[Cc]onnection|ncclRemoteError",
        "the network between nodes failed, or a node at its other end",
        "if it happens again on the same nodes, avoid them: cluster.exclude",
    ),
    Rule(
        "collective_timeout",
        "log",
        "continue",
        "-",
        r"Watchdog caught collective operation timeout|[Rr]eceived a dump signal due to a collective timeout"
        r"|Timed out waiting [0-9]+ms for (recv|send) operation",
        "ranks waited in vain for each other in a collective operation (NCCL time-out)",
        "one rank was late or hung: the ranks' own logs show which; all others are only victims",
    ),
    Rule(
        "port_taken",
        "log",
        "continue",
        "-",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the port at which its ranks were to meet was taken",
        "nothing: the next job has another",
    ),
    Rule(
        "rendezvous",
        "log",
        "continue",
        "-",
        r"DistNetworkError|DistStoreError|[Tt]imed out after [0-9]+ seconds waiting for clients"
        r"|client socket has timed out",
        "the ranks did not find each other at their start",
        "do all nodes reach the first one over the network? NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
    ),
    Rule(
        "cuda",
        "log",
        "continue",
        "-",
        r"CUDA error: |CUDA driver error|ncclUnhandledCudaError|Xid \(PCI:[^)]*\): [0-9]+",
        "a GPU reported an error, of the program or its own",
        "if it happens again on one node alone, avoid it (cluster.exclude); else it is the program's",
    ),
    Rule(
        "nccl",
        "log",
        "continue",
        "-",
        r"NCCL error|ncclSystemError|ncclInternalError|NCCL WARN ",
        "NCCL failed",
        "env_vars.NCCL_DEBUG=INFO tells more",
    ),
    Rule(
        "bus_error",
        "log",
        "continue",
        "-",
        r": tasks? [0-9,-]+: Bus error|^[^ ]*: line [0-9]+: .*Bus error|Bus error \(core dumped\)"
        r"|worker .* signal: Bus error",
        "a task lost a file that it had mapped (bus error)",
        "is /dev/shm full, or was a data file cut short while it was read?",
    ),
    Rule(
        "crashed",
        "log",
        "continue",
        "-",
        r": tasks? [0-9,-]+: (Segmentation fault|Aborted|Illegal instruction|Floating point exception)",
        "a task crashed",
        "its own log has the stack: `slipway logs --rank N RUN`",
    ),
    Rule(
        "killed",
        "log",
        "continue",
        "-",
        r": tasks? [0-9,-]+: Killed|its process is gone without a word",
        "a task was killed, often for want of memory",
        "if it happens again, ask for more memory: cluster.mem",
    ),
)
