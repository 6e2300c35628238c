"""The rules that a job's end itself decides: its exit code, and what Slurm says of it."""

from supervisor.rules import EXIT_INTERRUPTED, Rule

_CODE = r"^code=([0-9]+|-) "
_ENDED_BY_SLURM = _CODE + "state=COMPLETING reason="
_ENDED_AT = r"\*\*\* JOB [0-9_]+ ON [^ ]+ CANCELLED AT [^ ]+ "

# What decides whatever a log says; of that first what no later job could change.
FIRST = (
    Rule("done", "end", "done", "-", r"^code=0 |^code=- state=COMPLETED ", "all is done"),
    Rule(
        "cancelled",
        "end",
        "stop",
        "-",
        _CODE + r"state=(CANCELLED|REVOKED) |" + _ENDED_BY_SLURM + "None preempted=(None|-) requeue=[0-] ",
        "somebody cancelled it",
        "launch it again to go on from its newest checkpoint",
    ),
    Rule(
        "mistake",
        "end",
        "stop",
        "-",
        r"^code=2 ",
        "the payload refused what it was given (exit code 2), and would again",
        "the end of the log says what is wrong: `slipway logs RUN`",
    ),
    Rule(
        "diverged",
        "end",
        "stop",
        "-",
        r"^code=3 .* save=USR1$",
        "the loss or its gradient is no longer a number (exit code 3), and would not be again",
        "`slipway plot RUN` shows where; lower the learning rate, or go on from an earlier checkpoint",
    ),
    Rule(
        "deadline",
        "end",
        "stop",
        "-",
        _CODE + "state=(DEADLINE|COMPLETING reason=DeadLine) ",
        "its deadline passed, which is the next job's too",
        "launch it with a later cluster.deadline",
    ),
    Rule(
        "node_failed",
        "end",
        "exclude",
        "down",
        _CODE + "state=(NODE_FAIL|BOOT_FAIL|COMPLETING reason=(NodeDown|BootFail)) ",
        "a node of it failed",
    ),
    Rule(
        "preempted",
        "end",
        "continue",
        "-",
        _CODE + "state=(PREEMPTED|[^ ]+ reason=[^ ]+ preempted=[0-9][^ ]*) ",
        "another job took its nodes",
    ),
    # Slurm tells one from the other afterwards: the next life or link asks it.
    Rule(
        "ended_by_user",
        "end",
        "continue",
        "-",
        _ENDED_BY_SLURM + "None preempted=(None|-) requeue=1 ",
        "somebody cancelled or requeued it",
    ),
    Rule(
        "saved",
        "end",
        "continue",
        "-",
        rf"^code={EXIT_INTERRUPTED} ",
        "it saved and left, as it was asked to",
    ),
)

# How Slurm ended it, where no machine was broken.
LIMITS = (
    Rule(
        "time_limit",
        "end",
        "continue",
        "-",
        _CODE + "state=(TIMEOUT|COMPLETING reason=TimeLimit) ",
        "its time limit was reached before it had saved and left",
        "let it save earlier: resilience.save_before_end",
    ),
    Rule(
        "out_of_memory",
        "end",
        "continue",
        "-",
        _CODE + "state=(OUT_OF_MEMORY|COMPLETING reason=OutOfMemory) ",
        "a node had no memory left for it",
        "ask for more (cluster.mem), or use less: fewer data workers",
    ),
    Rule(
        "not_started",
        "end",
        "continue",
        "-",
        _CODE + "state=(FAILED|LAUNCH_FAILED|COMPLETING) reason=(JobLaunchFailure|Prolog)",
        "Slurm could not start it on its nodes",
        "`slipway history` names them; the administrators find the reason in slurmd's log",
    ),
    Rule(
        "time_limit",
        "log",
        "continue",
        "-",
        _ENDED_AT + "DUE TO TIME LIMIT",
        "its time limit was reached before it had saved and left",
        "let it save earlier: resilience.save_before_end",
    ),
    Rule("preempted", "log", "continue", "-", _ENDED_AT + "DUE TO PREEMPTION", "another job took its nodes"),
)

# Where nothing else tells.
LAST = (
    Rule(
        "cancelled",
        "log",
        "stop",
        "-",
        _ENDED_AT + r"\*\*\*$",
        "somebody cancelled it",
        "launch it again to go on from its newest checkpoint",
    ),
    Rule(
        "lost",
        "end",
        "continue",
        "-",
        r"^code=- ",
        "it ended without a word, as when its first node fails or its script is killed",
    ),
    Rule(
        "failed",
        "end",
        "continue",
        "-",
        r"^code=",
        "its tasks failed",
        "the end of the log says why: `slipway logs RUN`",
    ),
)
