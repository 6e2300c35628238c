"""Ask Slurm about the resources and limits of a cluster, and about the states of jobs.

Questions about a cluster run at once, with a short time limit: a user who checks a launch must not wait for a
busy cluster.
"""

from __future__ import annotations

import contextlib
import logging
import pwd
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from launcher.errors import escape, file_mode, shortened
from launcher.slurm import cluster, commands, records
from launcher.slurm.cluster import ASSOCIATION_FIELDS, QOS_FIELDS, ClusterFacts, Node
from launcher.slurm.commands import Answer, Retry, SchedulerSilent, Unreachable, error_text
from launcher.slurm.environment import clean_environment
from launcher.slurm.records import Record, parse_ends, parse_sacct, parse_squeue

PATIENCE_SECONDS = 5.0
# The time for a killed command to end.
_ENDING_SECONDS = 1.0

_ACCOUNTING = ("associations", "qos")

_SACCTMGR = ("sacctmgr", "--readonly", "--noheader", "--parsable2", "show")


@dataclass(frozen=True, slots=True)
class Reply:
    """The output of a command, or `why` it has no output."""

    text: str = ""
    why: str | None = None


def questions(partition: str | None, user: str) -> dict[str, list[str]]:
    """Return a command for each part of the facts about a cluster; of one partition's nodes or of all."""
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
    queries: Mapping[str, Sequence[str]], slurm_conf: str | None, patience: float = PATIENCE_SECONDS
) -> dict[str, Reply]:
    """Ask the first question and, if it is answered, all others at once; `patience` is in seconds for all."""
    if slurm_conf is not None and not file_mode(Path(slurm_conf)):
        return dict.fromkeys(queries, Reply(why=f"there is no {slurm_conf}"))
    environment, deadline = clean_environment(slurm_conf), time.monotonic() + patience
    first, *others = queries
    replies = dict.fromkeys(queries, _silent(patience))

    def ask(names: Sequence[str]) -> None:
        def ask_one(name: str) -> None:
            left = max(0.1, deadline - time.monotonic())
            replies[name] = _reply(queries[name], environment, left, patience)

        # Daemons: neither an interrupt nor a command that cannot be killed keeps the user waiting.
        threads = [threading.Thread(target=ask_one, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()) + _ENDING_SECONDS)

    ask([first])
    if replies[first].why is not None:
        return dict.fromkeys(queries, replies[first])
    ask(others)
    return dict(replies)


def _reply(command: Sequence[str], environment: Mapping[str, str], left: float, patience: float) -> Reply:
    try:
        answer = commands.run(command, environment, left, notify=False)
    except Unreachable as error:
        return Reply(why=error.message)
    except TimeoutError:
        return _silent(patience)
    if answer.code == 0:
        return Reply(answer.stdout)
    if commands.says_no_slurm(answer.stderr):
        return Reply(why=commands.NO_SLURM)
    return Reply(why=shortened(escape(f"{command[0]}: {error_text(answer.stderr)}")))


def _silent(patience: float) -> Reply:
    return Reply(why=f"Slurm did not answer within {patience:g} s")


def facts_of(replies: Mapping[str, Reply], *, of_default: bool = False) -> ClusterFacts:
    """Convert answers to facts; `of_default` keeps only the nodes of the default partition."""
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
        name = settings.name if settings is not None else None
        parts["associations"] = cluster.parse_associations(answers["associations"], name)
    if settings is not None and not settings.has_accounting:
        # Accounts are known not to exist, and so not missing.
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


# --- jobs

logger = logging.getLogger(__name__)

# The system's limit for one argument is 131,072 bytes.
_LONGEST_ARGUMENT = 120_000
# squeue's answer is useful without the accounting, which waits 45 s for its database.
_ACCOUNTING_SECONDS = 10.0
# Slurm forgets an unanswered submission long before; this bounds the search of sacct.
_OLDEST_SUBMISSION = timedelta(days=7)

# Without `--all` squeue leaves out the jobs of hidden partitions.
_SQUEUE = ("squeue", "--all", "--local", "--noheader", "--states=all", f"--Format={records.SQUEUE_FORMAT}")
_DELIMITER = f"--delimiter={records.SEPARATOR}"
_SACCT = ("sacct", "--noheader", "--parsable2", _DELIMITER, "--allocations", "--duplicates")


class JobQuestions:
    """The questions to one Slurm, which raise Unreachable without an answer, except those to the accounting.

    `unaccounted` is the reason why the accounting did not answer.
    """

    def __init__(self, environment: Mapping[str, str], retry: Retry) -> None:
        # Without it long lists of an array's tasks are cut short.
        self._environment = {**environment, "SLURM_BITSTR_LEN": "0"}
        self._retry = retry
        self._format = records.SACCT_FORMAT
        self.unaccounted: str | None = None

    def queue(self, job_ids: Sequence[str]) -> list[Record]:
        ids = ",".join(dict.fromkeys(job_ids))
        # If the list is too long for one argument, the whole queue is asked for.
        chosen = [f"--jobs={ids}"] if len(ids) <= _LONGEST_ARGUMENT else []
        return self._squeue(chosen)

    def outputs(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Return the files that jobs in the queue write their output to; a % in them may be doubled."""
        fields = f"JobArrayID:{records.SEPARATOR},StdOut:{records.SEPARATOR}"
        command = ["squeue", "--all", "--local", "--noheader", "--states=all", f"--Format={fields}"]
        command.append(f"--jobs={','.join(job_ids)}")
        rows = (
            line.split(records.SEPARATOR)
            for line in self._retry.ask(command, self._environment).stdout.splitlines()
        )
        return {row[0].strip(): row[1].strip() for row in rows if len(row) > 1}

    def queue_of(self, users: Iterable[str]) -> list[Record]:
        """Return the queue's records of some users' jobs, or of all jobs if a user is unknown here."""
        named = sorted(set(users))
        whose = [f"--user={','.join(named)}"] if all(map(_is_known, named)) else []
        return self._squeue(whose)

    def accounting(self, job_ids: Sequence[str]) -> list[Record]:
        """Return the attempts of some jobs in the accounting; empty without accounting or answer."""
        return self._sacct([f"--jobs={part}" for part in _parts(job_ids)])

    def ends(self, job_ids: Sequence[str]) -> dict[str, float]:
        """Return the known ends of jobs, or of tasks of arrays, in Unix seconds."""
        environment = {**self._environment, "SLURM_TIME_FORMAT": "%s"}
        parents = sorted({job_id.partition("_")[0] for job_id in job_ids})
        fields = f"JobArrayID:{records.SEPARATOR},EndTime:{records.SEPARATOR}"
        queue = ["squeue", "--all", "--local", "--noheader", "--states=all", f"--Format={fields}"]
        queue += [f"--jobs={part}" for part in _parts(parents)[:1]]
        ends = parse_ends(self._retry.ask(queue, environment).stdout)
        missing = [job_id for job_id in parents if job_id not in ends]
        if missing and self.unaccounted is None:
            options = ["--format=JobID,End", *(f"--jobs={part}" for part in _parts(missing))]
            with contextlib.suppress(Unreachable):
                ends = parse_ends(self._ask_accounting(options, environment).stdout) | ends
        return ends

    def accounting_since(self, submissions: Iterable[tuple[str, str]]) -> list[Record]:
        """Return the jobs in the accounting since the first of submissions: users, and times in ISO 8601."""
        now = datetime.now(UTC)
        dated = [(user, _time(since)) for user, since in submissions]
        recent = [(user, since) for user, since in dated if now - since < _OLDEST_SUBMISSION]
        if not recent:
            return []
        users = sorted({user for user, _ in recent})
        whose = f"--user={','.join(users)}" if all(map(_is_known, users)) else "--allusers"
        # sacct reads times in this machine's zone: the day before is early enough in every zone.
        since = min(since for _, since in recent) - timedelta(days=1)
        return self._sacct([whose, f"--starttime={since:%Y-%m-%d}"])

    def _squeue(self, options: Sequence[str]) -> list[Record]:
        answer = self._retry.ask([*_SQUEUE, *options], self._environment)
        # squeue calls the id of a single job that it has forgotten invalid; that is no failure.
        if answer.code != 0 and "Invalid job id" not in answer.stderr:
            message = error_text(answer.stderr)
            failure = commands.NO_SLURM if commands.says_no_slurm(answer.stderr) else "squeue failed"
            raise Unreachable(f"{failure}: {message}")
        return parse_squeue(answer.stdout)

    def _sacct(self, options: Sequence[str]) -> list[Record]:
        try:
            answer = self._ask_accounting([f"--format={self._format}", *options], self._environment)
        except SchedulerSilent as error:
            self.unaccounted = error.message
            logger.warning("%s; going by the queue and the jobs' own marks", error.message)
            return []
        except Unreachable:
            return []  # no sacct on this machine; squeue's answer is still good
        self.unaccounted = None
        if answer.code != 0 and "Invalid field" in answer.stderr and self._format == records.SACCT_FORMAT:
            self._format = records.SACCT_OLD_FORMAT
            return self._sacct(options)
        # Without accounting sacct exits 1; only the job's own marks are left.
        return parse_sacct(answer.stdout) if answer.code == 0 else []

    def _ask_accounting(self, options: Sequence[str], environment: Mapping[str, str]) -> Answer:
        return self._retry.ask(
            [*_SACCT, *options],
            environment,
            who="Slurm's accounting",
            timeout=_ACCOUNTING_SECONDS,
            again=False,
        )


def _parts(job_ids: Sequence[str]) -> list[str]:
    """Split ids into lists that are short enough for one argument; sacct takes several."""
    parts: list[str] = []
    for job_id in dict.fromkeys(job_ids):
        if parts and len(parts[-1]) + len(job_id) < _LONGEST_ARGUMENT:
            parts[-1] += f",{job_id}"
        else:
            parts.append(job_id)
    return parts


def _is_known(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
