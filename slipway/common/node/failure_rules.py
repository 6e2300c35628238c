"""The rules of failures, in the order in which they are tried.

Some look at the end itself, its exit code and Slurm's words; the others at words in a job's log: NVIDIA's,
torch's, Slurm's and the kernel's.

A rule is of the job's ``end``, a line of facts::

    code=143 state=COMPLETING reason=TimeLimit preempted=None requeue=0 progress=1 signal=TERM save=USR1

These are the exit code of its tasks; ``JobState``, ``Reason``, ``PreemptTime`` and ``Requeue`` of
``scontrol show job``; if there is a newer checkpoint than when it began; the signal that the job was sent
while they ran; and the signal that makes its payload save. ``-`` is not known. While Slurm ends a job whose
script still runs, its state is COMPLETING, and only the reason says why; for a job that leaves in time at a
preemption only ``PreemptTime`` does.

Or it is of its ``log``, where the first line counts that matches; records of failed ranks come before.
A log may hold any text: none of its rules excludes a node outside the job, and only that of Slurm's own
notice ends a chain.
"""

from typing import NamedTuple, Optional

from slipway.common.node.settings import EXIT_INTERRUPTED

_CODE = r"^code=([0-9]+|-) "
_ENDED_BY_SLURM = _CODE + "state=COMPLETING reason="
_ENDED_AT = r"\*\*\* JOB [0-9_]+ ON [^ ]+ CANCELLED AT [^ ]+ "


class FailureRule(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    verdict
        What follows for the chain: ``done``, ``stop``, ``continue``; ``exclude`` goes on without the nodes,
        or ``continue`` without nodes.
    pattern
        A regular expression: of the end, if it begins with ``^code=``; otherwise of a line of the log.
    means
        What happened, as a sentence for the user without its full stop.
    advice
        What the user can do; ``None`` if there is no remedy.
    line
        A regular expression that a line of the log has to match too: the exit code may be any program's.
    nodes
        Which nodes are at fault. ``line``: the first of the job's nodes that the line names, else the one of
        the rank that it names; ``down``: those that Slurm calls down, else the one that srun's line names.
    """

    name: str
    verdict: str
    pattern: str
    means: str
    advice: Optional[str] = None
    nodes: str = "-"
    line: Optional[str] = None

    @property
    def of(self) -> str:
        """Return ``end`` or ``log``, the text that the pattern is matched with."""
        return "end" if self.pattern.startswith("^code=") else "log"


# Rules that override the log, permanent endings first.
FIRST = (
    FailureRule("done", "done", r"^code=0 |^code=- state=COMPLETED ", "all is done"),
    FailureRule(
        "cancelled",
        "stop",
        _CODE + r"state=(CANCELLED|REVOKED) |" + _ENDED_BY_SLURM + "None preempted=(None|-) requeue=[0-] ",
        "somebody cancelled it",
        "slipway resume launches it again; a training goes on from its newest checkpoint",
    ),
    FailureRule(
        "mistake",
        "stop",
        r"^code=2 ",
        "the payload refused what it was given (exit code 2), and would again",
        "the end of the log says what is wrong: `slipway logs RUN`",
    ),
    FailureRule(
        "diverged",
        "stop",
        r"^code=3 .* save=USR1$",
        "the loss or its gradient is no longer a number (exit code 3), and would not be again",
        "`slipway plot RUN` shows where; lower the learning rate, or go on from an earlier checkpoint",
    ),
    # Of megatron-core's rerun_state_machine.py, as Megatron-LM, Megatron Bridge and NeMo 2 run it.
    FailureRule(
        "rerun",
        "exclude",
        r"^code=16 ",
        "Megatron wants a suspicious result computed again on another GPU (exit code 16)",
        "nothing: the next attempt or link is to run without the node, and tells whether its GPU is at fault",
        nodes="line",
        line=r"First rerun: unexpected result is reproducible|Got rescheduled on the same GPU",
    ),
    FailureRule(
        "rejected",
        "stop",
        r"^code=17 ",
        "Megatron computed a suspicious result again and rejects it (exit code 17), and would after a resume",
        "the log has the diagnosis, `Possible transient error`, `persistent error` or `Correct result`:"
        " examine the node that it names, or the data; then go on from an earlier checkpoint",
        line=r"Possible (transient|persistent) error!|Correct result \(but possible Application error\)",
    ),
    FailureRule(
        "deadline",
        "stop",
        _CODE + "state=(DEADLINE|COMPLETING reason=DeadLine) ",
        "its deadline passed, which is the next job's too",
        "launch it with a later cluster.deadline",
    ),
    FailureRule(
        "node_failed",
        "exclude",
        _CODE + "state=(NODE_FAIL|BOOT_FAIL|COMPLETING reason=(NodeDown|BootFail)) ",
        "a node of it failed",
        nodes="down",
    ),
    FailureRule(
        "preempted",
        "continue",
        _CODE + "state=(PREEMPTED|[^ ]+ reason=[^ ]+ preempted=[0-9][^ ]*) ",
        "another job took its nodes",
    ),
    # Slurm knows only afterwards which of them it was: the next attempt or link asks.
    FailureRule(
        "ended_by_user",
        "continue",
        _ENDED_BY_SLURM + "None preempted=(None|-) requeue=1 ",
        "somebody cancelled or requeued it",
    ),
    FailureRule(
        "left",
        "continue",
        rf"^code={EXIT_INTERRUPTED} .* progress=0 ",
        "it left, as it was asked to, and had saved nothing new",
        "is its time limit long enough? `slipway status` shows the limit that Slurm granted",
    ),
    FailureRule("saved", "continue", rf"^code={EXIT_INTERRUPTED} ", "it saved and left, as it was asked to"),
)

# A broken machine, which whoever comes next would meet again.
HARDWARE = (
    FailureRule(
        "gpu_lost",
        "exclude",
        r"Xid \(PCI:[^)]*\): 79[ ,]|[Ff]allen off the bus|GPU is lost"
        r"|Unable to determine the device handle for GPU",
        "a GPU was lost (Xid 79: it fell off the bus)",
        "tell the administrators: the node has to be restarted",
        nodes="line",
    ),
    FailureRule(
        "gpu_memory",
        "exclude",
        r"uncorrectable ECC error|Xid \(PCI:[^)]*\): (48|64|95|140)[ ,]|ECC page retirement or row remap",
        "the memory of a GPU has an error that cannot be corrected (ECC)",
        "tell the administrators: the GPU has to be reset, and exchanged if it happens again",
        nodes="line",
    ),
    FailureRule(
        "nvlink",
        "exclude",
        r"uncorrectable NVLink error|Xid \(PCI:[^)]*\): (74|14[4-9]|150)[ ,]"
        r"|Invalid access of peer GPU memory over nvlink",
        "the connection between GPUs of a node failed (NVLink)",
        "tell the administrators",
        nodes="line",
    ),
    FailureRule(
        "gpu_driver",
        "exclude",
        r"Xid \(PCI:[^)]*\): (62|119|120)[ ,]|CUDA error: system not yet initialized"
        r"|CUDA-capable device\(s\) is/are busy or unavailable",
        "the GPUs of a node, or their driver, do not answer",
        "tell the administrators: nvidia-smi on the node, and its fabric manager",
        nodes="line",
    ),
    FailureRule(
        "ib_port",
        "exclude",
        r"NET/IB ?: .*[Gg]ot async (fatal )?event ?:? *(port error|local catastrophic error|device fatal)",
        "a network port of a node failed (InfiniBand)",
        "tell the administrators: ibstat on the node",
        nodes="line",
    ),
    FailureRule(
        "node_failed", "exclude", r"^srun: error: Node failure on [^ ]", "a node of it failed", nodes="line"
    ),
    # A notice of a node that lives, which it names: another one failed.
    FailureRule(
        "node_failed", "exclude", r"DUE TO NODE( [^ ]+)? FAILURE", "a node of it failed", nodes="down"
    ),
)

# Ends by Slurm, where no machine was broken.
LIMITS = (
    FailureRule(
        "time_limit",
        "continue",
        _CODE + "state=(TIMEOUT|COMPLETING reason=TimeLimit) ",
        "its time limit was reached before it had saved and left",
        "let it save earlier: resilience.save_before_end",
    ),
    FailureRule(
        "out_of_memory",
        "continue",
        _CODE + "state=(OUT_OF_MEMORY|COMPLETING reason=OutOfMemory) ",
        "a node had no memory left for it",
        "ask for more (cluster.mem), or use less: fewer data workers",
    ),
    FailureRule(
        "not_started",
        "continue",
        _CODE + "state=(FAILED|LAUNCH_FAILED|COMPLETING) reason=(JobLaunchFailure|Prolog)",
        "Slurm could not start it on its nodes",
        "`slipway history` names them; the administrators find the reason in slurmd's log",
    ),
    FailureRule(
        "time_limit",
        "continue",
        _ENDED_AT + "DUE TO TIME LIMIT",
        "its time limit was reached before it had saved and left",
        "let it save earlier: resilience.save_before_end",
    ),
    FailureRule("preempted", "continue", _ENDED_AT + "DUE TO PREEMPTION", "another job took its nodes"),
)

# Failures in its tasks; a chain tries again, as long as it gets on.
TASKS = (
    # templates/supervisor.sh.j2 writes this line.
    FailureRule(
        "setup",
        "continue",
        r"^Job [0-9]+: (?P<said>(exit code [0-9]+ of line [0-9]+: |no ).*) on [^ ]+$",
        "the script failed before its tasks began",
        "the log names a line of cluster.setup, or of the site's template: try it in a shell on a node",
    ),
    FailureRule(
        "gpu_out_of_memory",
        "continue",
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU had no memory left",
        "a smaller micro_batch_size, more parallelism or activation recomputation: `slipway check`",
    ),
    FailureRule(
        "out_of_memory",
        "continue",
        r"[Dd]etected [0-9]+ oom[_-]kill event|: tasks? [0-9,-]+: Out Of Memory"
        r"|[Mm]emory cgroup out of memory|DataLoader worker .* is killed by signal: Killed",
        "a node had no memory left for it",
        "ask for more (cluster.mem), or use less: fewer data workers",
    ),
    FailureRule(
        "disk_full",
        "continue",
        r"No space left on device|[Qq]uota exceeded|(^|[^A-Z_])(ENOSPC|EDQUOT)([^A-Z_]|$)",
        "a file system was full",
        "make room; older checkpoints go by exp_manager.checkpoint_callback_params.save_top_k",
    ),
    FailureRule(
        "import_error",
        "continue",
        r"ModuleNotFoundError: |ImportError: |error while loading shared libraries",
        "a library was missing in its Python",
        "cluster.python or container: `slipway check` asks the interpreter what it has",
    ),
    FailureRule(
        "file_system",
        "continue",
        r"Stale file handle|Input/output error|Transport endpoint is not connected",
        "a file system failed",
        "if it happens again, tell the administrators",
    ),
    FailureRule(
        "container",
        "continue",
        r"error: pyxis: |enroot-[a-z]+: .*(ERROR|error)",
        "the container could not be started",
        "is the image there, and whole? The line after `pyxis:` in the log says what is missing",
    ),
    FailureRule(
        "network",
        "continue",
        r"NET/IB ?: [Gg]ot completion .*(status|error)|NET/Socket ?: .*[Cc]onnection|ncclRemoteError",
        "the network between nodes failed, or a node at its other end",
        "if it happens again on the same nodes, avoid them: cluster.exclude",
    ),
    FailureRule(
        "collective_timeout",
        "continue",
        r"Watchdog caught collective operation timeout|[Rr]eceived a dump signal due to a collective timeout"
        r"|Timed out waiting [0-9]+ms for (recv|send) operation",
        "ranks waited in vain for each other in a collective operation (NCCL time-out)",
        "one rank was late or hung: the ranks' own logs show which; all others are only victims",
    ),
    FailureRule(
        "port_taken",
        "continue",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the port at which its ranks were to meet was taken",
        "nothing: the next job has another",
    ),
    FailureRule(
        "rendezvous",
        "continue",
        r"DistNetworkError|DistStoreError|[Tt]imed out after [0-9]+ seconds waiting for clients"
        r"|client socket has timed out",
        "the ranks did not find each other at their start",
        "do all nodes reach the first one over the network? NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME",
    ),
    FailureRule(
        "cuda",
        "continue",
        r"CUDA error: |CUDA driver error|ncclUnhandledCudaError|Xid \(PCI:[^)]*\): [0-9]+",
        "a GPU reported an error, of the program or its own",
        "if it happens again on one node alone, avoid it (cluster.exclude); else it is the program's",
    ),
    FailureRule(
        "nccl",
        "continue",
        r"NCCL error|ncclSystemError|ncclInternalError|NCCL WARN ",
        "NCCL failed",
        "env_vars.NCCL_DEBUG=INFO tells more",
    ),
    FailureRule(
        "bus_error",
        "continue",
        r": tasks? [0-9,-]+: Bus error|^[^ ]*: line [0-9]+: .*Bus error|Bus error \(core dumped\)"
        r"|worker .* signal: Bus error",
        "a task lost a file that it had mapped (bus error)",
        "is /dev/shm full, or was a data file cut short while it was read?",
    ),
    FailureRule(
        "crashed",
        "continue",
        r": tasks? [0-9,-]+: (Segmentation fault|Aborted|Illegal instruction|Floating point exception)",
        "a task crashed",
        "its own log has the stack: `slipway logs --rank N RUN`",
    ),
    FailureRule(
        "killed",
        "continue",
        r": tasks? [0-9,-]+: Killed|its process is gone without a word",
        "a task was killed, often for want of memory",
        "if it happens again, ask for more memory: cluster.mem",
    ),
)

# The rules for an end that nothing else explains.
LAST = (
    FailureRule(
        "cancelled",
        "stop",
        _ENDED_AT + r"\*\*\*$",
        "somebody cancelled it",
        "slipway resume launches it again; a training goes on from its newest checkpoint",
    ),
    FailureRule(
        "lost",
        "continue",
        r"^code=- ",
        "it ended without a word, as when its first node fails or its script is killed",
    ),
    FailureRule(
        "failed", "continue", r"^code=", "its tasks failed", "the end of the log says why: `slipway logs RUN`"
    ),
)
