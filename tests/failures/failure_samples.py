"""Ends of jobs: logs of a real Slurm and of real trainings, and documented messages of machines.

``recorded/`` is of the sandbox (Slurm 22.05): jobs that ran out of time, were cancelled or preempted, whose
node's slurmd was killed, whose tasks were killed, failed or crashed, and trainings of ours with some of the
same ends. Only paths and long headers are left out. The facts are what ``scontrol show job`` printed then.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipway.common.node.judging import Facts

RECORDED = Path(__file__).parent / "recorded"
PREEMPT_TIME = "2026-11-22T01:34:36"
FAILED = Facts(1, "RUNNING", "None", "None", save="USR1")


@dataclass(frozen=True)
class Sample:
    """The end of a job on `hosts`, with the expected rule, verdict and nodes at fault."""

    name: str
    facts: Facts
    rule: str
    verdict: str = "continue"
    nodes: tuple[str, ...] = ()
    log: str = ""
    left: str = ""
    hosts: tuple[str, ...] = ("n1",)
    tasks_per_node: int = 1
    down: tuple[str, ...] = ()


def facts_of_end(
    code: int | None, state: str, reason: str = "None", preempted: str | None = "None", **further: Any
) -> Facts:
    return Facts(code, state, reason, preempted, **further)


def recorded_sample(
    log: str,
    facts: Facts,
    rule: str,
    verdict: str = "continue",
    nodes: tuple[str, ...] = (),
    *,
    hosts: tuple[str, ...] = ("n1",),
    down: tuple[str, ...] = (),
    left: str = "",
    name: str = "",
) -> Sample:
    text = (RECORDED / f"{log}.log").read_text(encoding="utf-8")
    return Sample(name or log, facts, rule, verdict, nodes, text, left, hosts, down=down)


TWO = ("n3", "n4")
TRAINED_ON = ("n2", "n3")
ON_REAL_CLUSTERS = [
    recorded_sample("time_limit", facts_of_end(143, "COMPLETING", "TimeLimit"), "time_limit"),
    # The script was killed with its job, so the next link asks Slurm.
    recorded_sample("time_limit_deaf", Facts(None, "TIMEOUT"), "time_limit"),
    recorded_sample("time_limit", FAILED, "time_limit", name="time_limit, Slurm did not answer"),
    recorded_sample("cancelled", facts_of_end(143, "COMPLETING"), "cancelled", "stop"),
    recorded_sample(
        "cancelled",
        facts_of_end(143, "COMPLETING", requeue=False),
        "cancelled",
        "stop",
        name="cancelled, --no-requeue",
    ),
    # Slurm says the same of a job that somebody cancels and of one that somebody requeues.
    recorded_sample(
        "cancelled",
        facts_of_end(143, "COMPLETING", requeue=True),
        "ended_by_user",
        name="cancelled or requeued",
    ),
    recorded_sample("cancelled_deaf", Facts(None, "CANCELLED"), "cancelled", "stop"),
    recorded_sample("cancelled", Facts(143), "cancelled", "stop", name="cancelled, Slurm did not answer"),
    recorded_sample("preempted_at_once", facts_of_end(143, "RUNNING", preempted=PREEMPT_TIME), "preempted"),
    recorded_sample(
        "preempted_after_grace", facts_of_end(143, "COMPLETING", preempted=PREEMPT_TIME), "preempted"
    ),
    recorded_sample("preempted_deaf", Facts(None, "PREEMPTED"), "preempted"),
    recorded_sample("preempted_deaf", Facts(143), "preempted", name="preempted, Slurm did not answer"),
    recorded_sample(
        "node_failed",
        facts_of_end(143, "COMPLETING", "NodeDown", signal="TERM"),
        "node_failed",
        "exclude",
        ("n4",),
        hosts=TWO,
        down=("n4",),
    ),
    recorded_sample(
        "node_failed",
        facts_of_end(143, "COMPLETING", "NodeDown"),
        "node_failed",
        "exclude",
        ("n4",),
        hosts=TWO,
        name="node_failed, sinfo did not answer",
    ),
    recorded_sample(
        "node_failed",
        Facts(143),
        "node_failed",
        "exclude",
        ("n4",),
        hosts=TWO,
        name="node_failed, Slurm did not answer",
    ),
    # The node that reports it is alive.
    Sample(
        "node_failed, of another node",
        Facts(None),
        "node_failed",
        log="slurmstepd-n3: error: *** JOB 7 ON n3 CANCELLED AT 2026-11-22T01:33:39 DUE TO NODE FAILURE, SEE"
        " SLURMCTLD LOG FOR DETAILS ***\n",
        hosts=TWO,
    ),
    # The first node, whose script died with it; it is up again when the next link asks.
    recorded_sample("trainer_saved", Facts(None, "NODE_FAIL"), "node_failed", name="node_failed, the first"),
    # A dead slurmd leaves its ranks alive: they saved.
    recorded_sample(
        "trainer_node_failed",
        facts_of_end(75, "COMPLETING", "NodeDown", save="USR1", signal="TERM"),
        "node_failed",
        "exclude",
        ("n3",),
        hosts=TRAINED_ON,
        down=("n3",),
    ),
    recorded_sample("trainer_saved", facts_of_end(75, "RUNNING", signal="USR1", save="USR1"), "saved"),
    recorded_sample("trainer_mistake", facts_of_end(2, "RUNNING", save="USR1"), "mistake", "stop"),
    recorded_sample("trainer_diverged", facts_of_end(3, "RUNNING", save="USR1"), "diverged", "stop"),
    recorded_sample("exit_3", facts_of_end(3, "RUNNING", save="TERM"), "failed"),
    recorded_sample(
        "trainer_killed",
        facts_of_end(137, "RUNNING", save="USR1"),
        "killed",
        left='{"time": 1795311784.872377, "rank": 1, "host": "n1", "error": "its process is gone without a'
        ' word: killed by a signal, or for want of memory", "log": null}',
    ),
    recorded_sample("task_killed", facts_of_end(137, "RUNNING"), "killed"),
    recorded_sample("segmentation_fault", facts_of_end(139, "RUNNING"), "crashed"),
    recorded_sample("bus_error", facts_of_end(135, "RUNNING"), "bus_error"),
    recorded_sample("disk_full", FAILED, "disk_full"),
    recorded_sample("rendezvous", FAILED, "rendezvous"),
    recorded_sample("collective_timeout", facts_of_end(143, "RUNNING"), "collective_timeout"),
    recorded_sample("import_error", FAILED, "import_error"),
    Sample("setup", FAILED, "setup", log="Job 4711: exit code 1 of line 17: eval 'module load x' on n1\n"),
]

# Slurm's states of jobs that left nothing in a log.
STATES_OF_SLURM = [
    Sample("done", Facts(0, "RUNNING", "None", "None"), "done", "done"),
    Sample("done, and nobody knows", Facts(0), "done", "done"),
    Sample("done, its last word lost", Facts(None, "COMPLETED"), "done", "done"),
    Sample("out of memory", Facts(None, "OUT_OF_MEMORY"), "out_of_memory"),
    Sample("deadline", facts_of_end(143, "COMPLETING", "DeadLine"), "deadline", "stop"),
    Sample("deadline, afterwards", Facts(None, "DEADLINE"), "deadline", "stop"),
    Sample("not started", Facts(None, "FAILED", "JobLaunchFailure"), "not_started"),
    Sample("lost", Facts(), "lost"),
    Sample("left", Facts(75, "RUNNING", signal="USR1", save="USR1", progress=False), "left"),
    Sample("saved", Facts(75, "RUNNING", signal="USR1", save="USR1", progress=True), "saved"),
    Sample("failed", FAILED, "failed"),
]

XID = "[ 8431.117] NVRM: Xid (PCI:0000:3b:00): {}, pid=31337, name=python"
WATCHDOG = (
    "[rank9]:[E1122 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 9] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE, NumelIn=5056, NumelOut=5056,"
    " Timeout(ms)=600000) ran for 600026 milliseconds before timing out."
)
ON_EIGHT = ("g01", "g02", "g03", "g04")


def documented_samples(rule: str, *lines: str, nodes: tuple[str, ...] = (), left: str = "") -> list[Sample]:
    """Return a sample for each line, in the log of a job of four nodes with eight tasks each."""
    verdict = "exclude" if nodes else "continue"
    return [
        Sample(
            f"{rule}: {line[:48]}", FAILED, rule, verdict, nodes,
            f"step 3/9\n{line}\nsrun: error: g01: task 0: Exited with exit code 1\n", left, ON_EIGHT, 8,
        )
        for line in lines
    ]  # fmt: skip


# From the manuals and trackers of NVIDIA's driver (its catalogue of Xids), CUDA, NCCL, torch, Slurm, Pyxis.
DOCUMENTED = [
    *documented_samples(
        "gpu_lost",
        f"g03: {XID.format('79')}, GPU has fallen off the bus.",
        "g03: Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system",
        nodes=("g03",),
    ),
    *documented_samples("gpu_lost", f"{XID.format('79')}, GPU has fallen off the bus."),
    *documented_samples(
        "gpu_memory",
        "[rank9]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "[E ProcessGroupNCCL.cpp:916] [Rank 9] NCCL watchdog thread terminated with exception: CUDA error:"
        " uncorrectable ECC error encountered",
        f"g02.cluster.example: {XID.format('48')}, DBE (double bit error) detected",
        f"g02 kernel: {XID.format('95')}, Uncontained: LTC TAG (0x2,0x0)",
        nodes=("g02",),
    ),
    # Its peers know only that they lost it.
    *documented_samples(
        "gpu_memory",
        "rank 3 on g01 was lost: RuntimeError: Connection closed by peer",
        nodes=("g04",),
        left='{"time": 1795311784.5, "rank": 30, "host": "g04", "error": "AcceleratorError: CUDA error:'
        ' uncorrectable ECC error encountered", "log": "nemo_error_log.txt"}',
    ),
    *documented_samples(
        "nvlink",
        "[rank31]: RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
        f"g04: {XID.format('74')}, NVLink: fatal error detected on link 4(0x10000, 0x0, 0x0)",
        nodes=("g04",),
    ),
    *documented_samples(
        "gpu_driver",
        f"g01: {XID.format('119')}, Timeout waiting for RPC from GSP0! Expected function 76 (GSP_RM_CONTROL)",
        "[rank0]: RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "rank 7: RuntimeError: CUDA error: system not yet initialized",
        nodes=("g01",),
    ),
    *documented_samples(
        "ib_port",
        "g04:4242:4311 [5] NCCL WARN NET/IB : mlx5_5:1 Got async event : port error",
        nodes=("g04",),
    ),
    *documented_samples("collective_timeout", WATCHDOG),
    *documented_samples(
        "network",
        "g02:3468:3905 [4] transport/net_ib.cc:1615 NCCL WARN NET/IB : Got completion from peer"
        " 10.1.0.4<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv)",
        "torch.distributed.DistBackendError: ncclRemoteError: A call failed possibly due to a network error",
    ),
    *documented_samples(
        "gpu_out_of_memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
        " capacity of 79.11 GiB",
    ),
    *documented_samples(
        "out_of_memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have been"
        " OOM Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 3495064.0 cgroup. Some of your processes may"
        " have been killed by the cgroup out-of-memory handler.",
        "srun: error: g03: tasks 1-3: Out Of Memory",
        "RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed.",
    ),
    *documented_samples(
        "port_taken",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network"
        " address. port: 23011, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ),
    *documented_samples("file_system", "OSError: [Errno 116] Stale file handle: '/lustre/data/text.bin'"),
    *documented_samples(
        "container",
        "slurmstepd: error: pyxis: container start failed with error code: 1",
        "slurmstepd: error: pyxis:     [ERROR] No such file or directory: /apps/nemo.sqsh",
    ),
    *documented_samples(
        "cuda",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        f"{XID.format('31')}, MMU Fault: ENGINE GRAPHICS",
    ),
    *documented_samples(
        "nccl", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251"
    ),
]  # fmt: skip

# megatron-core 0.16's rerun_state_machine.py says these, and Megatron-LM exits with 16 or 17.
_SAYS = "Rank 9, node g02, device 1, iteration #150: {}!\n"
_REPRODUCIBLE = "First rerun: unexpected result is reproducible within the tolerance (nan = nan)."
_SAME_GPU = (
    "Got rescheduled on the same GPU. Need to resume again from the same checkpoint (node: g03, gpu: 1)\n"
)
RERUN = [
    Sample(
        name, Facts(code, "RUNNING", "None", "None", save="TERM"), rule, verdict, nodes, log, "", ON_EIGHT, 8
    )
    for name, code, rule, verdict, nodes, log in (
        ("rerun", 16, "rerun", "exclude", ("g02",), _SAYS.format(_REPRODUCIBLE)),
        ("rerun on the same GPU", 16, "rerun", "exclude", ("g03",), _SAME_GPU),
        ("exit 16 of another program", 16, "failed", "continue", (), "step 3/9 | loss 1\n"),
        ("a rerun that went on", 1, "failed", "continue", (), _SAYS.format(_REPRODUCIBLE)),
        ("transient error", 17, "rejected", "stop", (), _SAYS.format("Possible transient error!")),
        ("persistent error", 17, "rejected", "stop", (), _SAYS.format("Possible persistent error!")),
        (
            "a correct result",
            17,
            "rejected",
            "stop",
            (),
            _SAYS.format("Correct result (but possible Application error) (loss)"),
        ),
        ("exit 17 of another program", 17, "failed", "continue", (), "step 3/9 | loss 1\n"),
    )
]

# The words of Python, C, Lustre and Node for a disk or a quota that is used up.
FULL = [
    Sample(f"disk_full, {line}", FAILED, "disk_full", log=f"step 3/9 | loss 1\n{line}\n")
    for line in (
        "OSError: [Errno 28] No space left on device: '/r/checkpoints'",
        "OSError: [Errno 122] Disk quota exceeded",
        "cp: error writing 'x': Disk quota exceeded",
        "lfs: Quota exceeded.",
        "write failed: ENOSPC",
        "Error: EDQUOT: disk quota exceeded, write",
    )
]

SAMPLES = [*ON_REAL_CLUSTERS, *STATES_OF_SLURM, *DOCUMENTED, *RERUN, *FULL]
