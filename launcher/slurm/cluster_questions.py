"""What a Slurm says of itself: several questions at once, with little patience.

A cluster that is busy must not keep anybody waiting who only wants to know whether a job would fit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import file_mode, one_line, shortened
from launcher.schedulers.commands import Unreachable, clean_environment, run, words
from launcher.schedulers.failures import NO_SLURM, is_without_configuration

PATIENCE_SECONDS = 5.0
# For a command that was told to end.
_ENDING_SECONDS = 1.0

# What each line of these answers holds, in this order; none of it may hold a bar.
NODE_FIELDS = ("partition", "name", "state", "cpus", "memory", "gres", "features")
ASSOCIATION_FIELDS = (
    "user",
    "defaultaccount",
    "cluster",
    "account",
    "partition",
    "qos",
    "defaultqos",
    "maxwall",
    "maxtres",
    "grptres",
    "maxsubmit",
)
QOS_FIELDS = ("name", "flags", "maxwall", "mintres", "maxtres", "maxtrespu", "grptres", "maxsubmitpu")

_SACCTMGR = ("sacctmgr", "--readonly", "--noheader", "--parsable2", "show")


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command said; or `why` it said nothing."""

    text: str = ""
    why: str | None = None


def questions(partition: str | None, user: str) -> dict[str, list[str]]:
    """What to ask, by what is asked for.

    Parameters
    ----------
    partition
        As sbatch takes it; ``None`` asks for the nodes of all partitions.
    """
    # Of this cluster alone where it is one of a federation; of hidden partitions too, which take jobs. sinfo
    # takes the latter for granted where one is named, and refuses to be told.
    nodes = ["sinfo", "--local", "--Node", "--noheader", "--format=%P|%N|%T|%c|%m|%G|%f"]
    mine = ["user", "withassoc", f"name={user}", f"format={','.join(ASSOCIATION_FIELDS)}"]
    return {
        "settings": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "--local", "--all", "--oneliner", "show", "partition"],
        "nodes": [*nodes, "--all" if partition is None else f"--partition={partition}"],
        "associations": [*_SACCTMGR, *mine],
        "qos": [*_SACCTMGR, "qos", f"format={','.join(QOS_FIELDS)}"],
        "pyxis": ["srun", "--help"],
    }


def ask_at_once(
    asked: Mapping[str, Sequence[str]], slurm_conf: str | None, patience: float = PATIENCE_SECONDS
) -> dict[str, Reply]:
    """Ask the first question and, if there is somebody who answers, all others at the same time.

    Parameters
    ----------
    patience
        In seconds, for all together.
    """
    if slurm_conf is not None and not file_mode(Path(slurm_conf)):
        return dict.fromkeys(asked, Reply(why=f"there is no {slurm_conf}"))
    environment, deadline = clean_environment(slurm_conf), time.monotonic() + patience
    first, *others = asked
    replies = dict.fromkeys(asked, _silent(patience))

    def ask(names: Sequence[str]) -> None:
        def one(name: str) -> None:
            left = max(0.1, deadline - time.monotonic())
            replies[name] = _reply(asked[name], environment, left, patience)

        # Daemons: whoever interrupts the launcher, or a command that cannot be ended, keeps nobody waiting.
        threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()) + _ENDING_SECONDS)

    ask([first])
    if replies[first].why is not None:
        return dict.fromkeys(asked, replies[first])
    ask(others)
    return dict(replies)


def _reply(command: Sequence[str], environment: Mapping[str, str], left: float, patience: float) -> Reply:
    try:
        answer = run(command, environment, left, tell=False)
    except Unreachable as error:
        return Reply(why=error.message)
    except TimeoutError:
        return _silent(patience)
    if answer.code == 0:
        return Reply(answer.stdout)
    if is_without_configuration(answer.stderr):
        return Reply(why=NO_SLURM)
    return Reply(why=shortened(one_line(f"{command[0]}: {words(answer.stderr)}")))


def _silent(patience: float) -> Reply:
    return Reply(why=f"Slurm did not answer within {patience:g} s")


def rows(text: str, fields: Sequence[str]) -> Iterable[dict[str, str]]:
    """The lines of an answer whose fields are separated by bars."""
    for line in text.split("\n"):
        values = line.split("|")
        if len(values) == len(fields):
            yield dict(zip(fields, values, strict=True))


def pairs(line: str) -> dict[str, str]:
    """``Name=value`` of scontrol, separated by blanks."""
    return {name: value for name, sign, value in (word.partition("=") for word in line.split()) if sign}
