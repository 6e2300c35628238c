"""The rules of failures, in the order in which they are tried.

Some look at the end itself, its exit code and Slurm's words; the others at words in a job's log: NVIDIA's,
torch's, Slurm's and the kernel's.
"""

from slipway.common.node.rules import EXIT_INTERRUPTED, FailureRule

_CODE = r"^code=([0-9]+|-) "
_ENDED_BY_SLURM = _CODE + "state=COMPLETING reason="
_ENDED_AT = r"\*\*\* JOB [0-9_]+ ON [^ ]+ CANCELLED AT [^ ]+ "

# Rules that override the log, permanent endings first.
FIRST = (
    FailureRule("done", "end", "done", "-", r"^code=0 |^code=- state=COMPLETED ", "all is done"),
    FailureRule(
        "cancelled",
        "end",
        "stop",
        "-",
        _CODE + r"state=(CANCELLED|REVOKED) |" + _ENDED_BY_SLURM + "None preempted=(None|-) requeue=[0-] ",
        "somebody cancelled it",
        "slipway resume launches it again; a training goes on from its newest checkpoint",
    ),
    FailureRule(
        "mistake",
        "end",
        "stop",
        "-",
        r"^code=2 ",
        "the payload refused what it was given (exit code 2), and would again",
        "the end of the log says what is wrong: `slipway logs RUN`",
    ),
    FailureRule(
        "diverged",
        "end",
        "stop",
        "-",
        r"^code=3 .* save=USR1$",
        "the loss or its gradient is no longer a number (exit code 3), and would not be again",
        "`slipway plot RUN` shows where; lower the learning rate, or go on from an earlier checkpoint",
    ),
    FailureRule(
        "deadline",
        "end",
        "stop",
        "-",
        _CODE + "state=(DEADLINE|COMPLETING reason=DeadLine) ",
        "its deadline passed, which is the next job's too",
        "launch it with a later cluster.deadline",
    ),
    FailureRule(
        "node_failed",
        "end",
        "exclude",
        "down",
        _CODE + "state=(NODE_FAIL|BOOT_FAIL|COMPLETING reason=(NodeDown|BootFail)) ",
        "a node of it failed",
    ),
    FailureRule(
        "preempted",
        "end",
        "continue",
        "-",
        _CODE + "state=(PREEMPTED|[^ ]+ reason=[^ ]+ preempted=[0-9][^ ]*) ",
        "another job took its nodes",
    ),
    # Slurm tells one from the other afterwards: the next attempt or link asks it.
    FailureRule(
        "ended_by_user",
        "end",
        "continue",
        "-",
        _ENDED_BY_SLURM + "None preempted=(None|-) requeue=1 ",
        "somebody cancelled or requeued it",
    ),
    FailureRule(
        "left",
        "end",
        "continue",
        "-",
        rf"^code={EXIT_INTERRUPTED} .* progress=0 ",
        "it left, as it was asked to, and had saved nothing new",
        "is its time limit long enough? `slipway status` shows the limit that Slurm granted",
    ),
    FailureRule(
        "saved",
        "end",
        "continue",
        "-",
        rf"^code={EXIT_INTERRUPTED} ",
        "it saved and left, as it was asked to",
    ),
)

# A broken machine, which whoever comes next would meet again.
HARDWARE = (
    FailureRule(
        "gpu_lost",
        "log",
        "exclude",
        "line",
        r"Xid \(PCI:[^)]*\): 79[ ,]|[Ff]allen off the bus|GPU is lost"
        r"|Unable to determine the device handle for GPU",
        "a GPU was lost (Xid 79: it fell off the bus)",
        "tell the administrators: the node has to be restarted",
    ),
    FailureRule(
        "gpu_memory",
        "log",
        "exclude",
        "line",
        r"uncorrectable ECC error|Xid \(PCI:[^)]*\): (48|64|95|140)[ ,]|ECC page retirement or row remap",
        "the memory of a GPU has an error that cannot be corrected (ECC)",
        "tell the administrators: the GPU has to be reset, and exchanged if it happens again",
    ),
    FailureRule(
        "nvlink",
        "log",
        "exclude",
        "line",
        r"uncorrectable NVLink error|Xid \(PCI:[^)]*\): (74|14[4-9]|150)[ ,]"
        r"|Invalid access of peer GPU memory over nvlink",
        "the connection between GPUs of a node failed (NVLink)",
        "tell the administrators",
    ),
    FailureRule(
        "gpu_driver",
        "log",
        "exclude",
        "line",
        r"Xid \(PCI:[^)]*\): (62|119|120)[ ,]|CUDA error: system not yet initialized"
        r"|CUDA-capable device\(s\) is/are busy or unavailable",
        "the GPUs of a node, or their driver, do not answer",
        "tell the administrators: nvidia-smi on the node, and its fabric manager",
    ),
    FailureRule(
        "ib_port",
        "log",
        "exclude",
        "line",
        r"NET/IB ?: .*[Gg]ot async (fatal )?event ?:? *(port error|local catastrophic error|device fatal)",
        "a network port of a node failed (InfiniBand)",
        "tell the administrators: ibstat on the node",
    ),
    FailureRule(
        "node_failed",
        "log",
        "exclude",
        "line",
        r"^srun: error: Node failure on [^ ]",
        "a node of it failed",
    ),
    # A notice of a node that lives, which it names: another one failed.
    FailureRule(
        "node_failed", "log", "exclude", "down", r"DUE TO NODE( [^ ]+)? FAILURE", "a node of it failed"
    ),
)

# Ends by Slurm, where no machine was broken.
LIMITS = (
    FailureRule(
        "time_limit",
        "end",
        "continue",
        "-",
        _CODE + "state=(TIMEOUT|COMPLETING reason=TimeLimit) ",
        "its time limit was reached before it had saved and left",
        "let it save earlier: resilience.save_before_end",
    ),
    FailureRule(
        "out_of_memory",
        "end",
        "continue",
        "-",
        _CODE + "state=(OUT_OF_MEMORY|COMPLETING reason=OutOfMemory) ",
        "a node had no memory left for it",
        "ask for more (cluster.mem), or use less: fewer data workers",
    ),
    FailureRule(
        "not_started",
        "end",
        "continue",
        "-",
        _CODE + "state=(FAILED|LAUNCH_FAILED|COMPLETING) reason=(JobLaunchFailure|Prolog)",
        "Slurm could not start it on its nodes",
        "`slipway history` names them; the administrators find the reason in slurmd's log",
    ),
    FailureRule(
        "time_limit",
        "log",
        "continue",
        "-",
        _ENDED_AT + "DUE TO TIME LIMIT",
        "its time limit was reached before it had saved and left",
        "let it save earlier: resilience.save_before_end",
    ),
    FailureRule(
        "preempted", "log", "continue", "-", _ENDED_AT + "DUE TO PREEMPTION", "another job took its nodes"
    ),
)

# Failures in its tasks; a chain tries again, as long as it gets on.
TASKS = (
    FailureRule(
        "gpu_out_of_memory",
        "log",
        "continue",
        "-",
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU had no memory left",
        "a smaller micro_batch_size, more parallelism or activation recomputation: `slipway check`",
    ),
    FailureRule(
        "out_of_memory",
        "log",
        "continue",
        "-",
        r"[Dd]etected [0-9]+ oom[_-]kill event|: tasks? [0-9,-]+: Out Of Memory"
        r"|[Mm]emory cgroup out of memory|DataLoader worker .* is killed by signal: Killed",
        "a node had no memory left for it",
        "ask for more (cluster.mem), or use less: fewer data workers",
    ),
    FailureRule(
        "disk_full",
        "log",
        "continue",
        "-",
        r"No space left on device|[Qq]uota exceeded|(^|[^A-Z_])(ENOSPC|EDQUOT)([^A-Z_]|$)",
        "a file system was full",
        "make room; older checkpoints go by exp_manager.checkpoint_callback_params.save_top_k",
    ),
    FailureRule(
        "import_error",
        "log",
        "continue",
        "-",
        r"ModuleNotFoundError: |ImportError: |error while loading shared libraries",
        "a library was missing in its Python",
        "cluster.python or container: `slipway check` asks the interpreter what it has",
    ),
    FailureRule(
        "file_system",
        "log",
        "continue",
        "-",
        r"Stale file handle|Input/output error|Transport endpoint is not connected",
        "a file system failed",
        "if it happens again, tell the administrators",
    ),
    FailureRule(
        "container",
        "log",
        "continue",
        "-",
        r"error: pyxis: |enroot-[a-z]+: .*(ERROR|error)",
        "the container could not be started",
        "is the image there, and whole? The line after `pyxis:` in the log says what is missing",
    ),
    FailureRule(
        "network",
        "log",
        "continue",
        "-",
        r"NET/IB ?: [Gg]ot completion .*(status|error)|NET/Socket ?: .*[Cc]onnection|ncclRemoteError",
        "the network between nodes failed, or a node at its other end",
        "if it happens again on the same nodes, avoid them: cluster.exclude",
    ),
    FailureRule(
        "collective_timeout",
        "log",
        "continue",
        "-",
        r"Watchdog caught collective operation timeout|[Rr]eceived a dump signal due to a collective timeout"
        r"|Timed out waiting [0-9]+ms for (recv|send) operation",
        "ranks waited in vain for each other in a collective operation (NCCL time-out)",
        "one rank was late or hung: the ranks' own logs show which; all others are only victims",
    ),
    FailureRule(
        "port_taken",
        "log",
        "continue",
        "-",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the port at which its ranks were to meet was taken",
        "nothing: the next job has another",
    ),
    FailureRule(
        "rendezvous",
        "log",
        "continue",
        "-",
        r"DistNetworkError|DistStoreError|[Tt]imed out after [0-9]+ seconds waiting for clients"
        r"|client socket has timed out",
        "the ranks did not find each other at their start",
        "do all nodes reach the first one over the network? NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
    ),
    FailureRule(
        "cuda",
        "log",
        "continue",
        "-",
        r"CUDA error: |CUDA driver error|ncclUnhandledCudaError|Xid \(PCI:[^)]*\): [0-9]+",
        "a GPU reported an error, of the program or its own",
        "if it happens again on one node alone, avoid it (cluster.exclude); else it is the program's",
    ),
    FailureRule(
        "nccl",
        "log",
        "continue",
        "-",
        r"NCCL error|ncclSystemError|ncclInternalError|NCCL WARN ",
        "NCCL failed",
        "env_vars.NCCL_DEBUG=INFO tells more",
    ),
    FailureRule(
        "bus_error",
        "log",
        "continue",
        "-",
        r": tasks? [0-9,-]+: Bus error|^[^ ]*: line [0-9]+: .*Bus error|Bus error \(core dumped\)"
        r"|worker .* signal: Bus error",
        "a task lost a file that it had mapped (bus error)",
        "is /dev/shm full, or was a data file cut short while it was read?",
    ),
    FailureRule(
        "crashed",
        "log",
        "continue",
        "-",
        r": tasks? [0-9,-]+: (Segmentation fault|Aborted|Illegal instruction|Floating point exception)",
        "a task crashed",
        "its own log has the stack: `slipway logs --rank N RUN`",
    ),
    FailureRule(
        "killed",
        "log",
        "continue",
        "-",
        r": tasks? [0-9,-]+: Killed|its process is gone without a word",
        "a task was killed, often for want of memory",
        "if it happens again, ask for more memory: cluster.mem",
    ),
)

# The rules for an end that nothing else explains.
LAST = (
    FailureRule(
        "cancelled",
        "log",
        "stop",
        "-",
        _ENDED_AT + r"\*\*\*$",
        "somebody cancelled it",
        "slipway resume launches it again; a training goes on from its newest checkpoint",
    ),
    FailureRule(
        "lost",
        "end",
        "continue",
        "-",
        r"^code=- ",
        "it ended without a word, as when its first node fails or its script is killed",
    ),
    FailureRule(
        "failed",
        "end",
        "continue",
        "-",
        r"^code=",
        "its tasks failed",
        "the end of the log says why: `slipway logs RUN`",
    ),
)
