"""Ask a Slurm cluster what it has and allows: several questions at once, with a short time limit.

A busy cluster must not keep a user waiting who only wants to know whether a job would fit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import file_mode, one_line, shortened
from launcher.slurm import cluster
from launcher.slurm.cluster import ASSOCIATION_FIELDS, QOS_FIELDS, ClusterFacts, Node
from launcher.slurm.commands import NO_SLURM, Unreachable, error_text, run, says_no_slurm
from launcher.slurm.environment import clean_environment

PATIENCE_SECONDS = 5.0
# The time for a killed command to end.
_ENDING_SECONDS = 1.0

_ACCOUNTING = ("associations", "qos")

_SACCTMGR = ("sacctmgr", "--readonly", "--noheader", "--parsable2", "show")


@dataclass(frozen=True, slots=True)
class Reply:
    """The output of a command; or `why` there is none."""

    text: str = ""
    why: str | None = None


def questions(partition: str | None, user: str) -> dict[str, list[str]]:
    """Return the commands that ask about a cluster, by the part that each tells.

    Parameters
    ----------
    partition
        As sbatch takes it; ``None`` asks for the nodes of all partitions.
    """
    # Only this cluster of a federation; hidden partitions too, which accept jobs. sinfo shows these anyway if
    # a partition is named, and then refuses --all.
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
    commands: Mapping[str, Sequence[str]], slurm_conf: str | None, patience: float = PATIENCE_SECONDS
) -> dict[str, Reply]:
    """Ask the first question and, if it is answered, all others at the same time.

    Parameters
    ----------
    patience
        The time limit for all together, in seconds.
    """
    if slurm_conf is not None and not file_mode(Path(slurm_conf)):
        return dict.fromkeys(commands, Reply(why=f"there is no {slurm_conf}"))
    environment, deadline = clean_environment(slurm_conf), time.monotonic() + patience
    first, *others = commands
    replies = dict.fromkeys(commands, _silent(patience))

    def ask(names: Sequence[str]) -> None:
        def ask_one(name: str) -> None:
            left = max(0.1, deadline - time.monotonic())
            replies[name] = _reply(commands[name], environment, left, patience)

        # Daemons: neither an interrupt nor a command that cannot be killed keeps the user waiting.
        threads = [threading.Thread(target=ask_one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()) + _ENDING_SECONDS)

    ask([first])
    if replies[first].why is not None:
        return dict.fromkeys(commands, replies[first])
    ask(others)
    return dict(replies)


def _reply(command: Sequence[str], environment: Mapping[str, str], left: float, patience: float) -> Reply:
    try:
        answer = run(command, environment, left, notify=False)
    except Unreachable as error:
        return Reply(why=error.message)
    except TimeoutError:
        return _silent(patience)
    if answer.code == 0:
        return Reply(answer.stdout)
    if says_no_slurm(answer.stderr):
        return Reply(why=NO_SLURM)
    return Reply(why=shortened(one_line(f"{command[0]}: {error_text(answer.stderr)}")))


def _silent(patience: float) -> Reply:
    return Reply(why=f"Slurm did not answer within {patience:g} s")


def facts_of(replies: Mapping[str, Reply], *, of_default: bool = False) -> ClusterFacts:
    """Return the facts that the answers tell.

    Parameters
    ----------
    of_default
        Keep the nodes of the default partition alone, although those of all were asked for.
    """
    missing = {name: reply.why for name, reply in replies.items() if reply.why is not None}
    answers = {name: reply.text for name, reply in replies.items() if name not in missing}
    parts: dict[str, Any] = {name: _READERS[name](text) for name, text in answers.items() if name in _READERS}
    if parts.get("partitions") == ():
        del parts["partitions"]
        missing["partitions"] = "Slurm shows no partitions"
    settings = parts.get("settings")
    if "nodes" in answers:
        parts["nodes"] = cluster.parse_nodes(answers["nodes"], of_default=of_default)
    if "associations" in answers:
        name = cluster.parse_cluster_name(answers.get("settings", ""))
        parts["associations"] = cluster.parse_associations(answers["associations"], name)
    if settings is not None and not settings.has_accounting:
        # There are no accounts: that is known, and not missing.
        parts |= dict.fromkeys(_ACCOUNTING, ())
        missing = {name: why for name, why in missing.items() if name not in _ACCOUNTING}
    return ClusterFacts(gpu_types=_gpu_types(parts.get("nodes")), missing=missing, **parts)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "partitions": cluster.parse_partitions,
    "settings": cluster.parse_settings,
    "qos": cluster.parse_qos,
    "pyxis": lambda text: "--container-image" in text,
}


def _gpu_types(nodes: Mapping[str, tuple[Node, ...]] | None) -> tuple[str, ...] | None:
    if nodes is None:
        return None
    types = {type_ for some in nodes.values() for node in some for type_, _ in node.gpus}
    return tuple(sorted(types)) if types and "" not in types else None
