"""The form of a rule about the end of a job; `slipway.common.node.failure_rules` has the table.

A rule is of the job's ``end``, a line of facts::

    code=143 state=COMPLETING reason=TimeLimit preempted=None requeue=0 progress=1 signal=TERM save=USR1

which are the exit code of its tasks; ``JobState``, ``Reason``, ``PreemptTime`` and ``Requeue`` of
``scontrol show job``; if there is a newer checkpoint than when it began; what the job was sent while they
ran; and by which signal its payload is told to save.
``-`` is not known. While Slurm ends a job whose script still runs, its state is COMPLETING, and only the
reason tells why; of a job that leaves in time at a preemption not even that, but ``PreemptTime`` does.

Or it is of its ``log``, where the first line counts that matches; what ranks left when they failed comes
before. Anything may stand in a log: no rule of it excludes a node but one of the job's own, and none ends a
chain but that of Slurm's own notice.
"""

from typing import NamedTuple, Optional

# The trainer's exit code when it was asked to stop and has saved: EX_TEMPFAIL of sysexits.h.
EXIT_INTERRUPTED = 75


class FailureRule(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    of
        What the pattern is looked for in: ``end`` or ``log``.
    verdict
        What follows for the chain: ``done``, ``stop``, ``continue``; ``exclude`` goes on without the nodes,
        ``continue`` where there are none.
    nodes
        Which nodes are at fault. ``line``: the first of the job's nodes that the line names, else the one of
        the rank that it names; ``down``: those that Slurm calls down, else the one that srun's line names.
    means
        What happened, as a sentence for the user without its full stop.
    advice
        What the user can do; ``None`` where nothing is to be done.
    """

    name: str
    of: str
    verdict: str
    nodes: str
    pattern: str
    means: str
    advice: Optional[str] = None
