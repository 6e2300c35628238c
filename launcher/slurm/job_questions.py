"""The two questions to Slurm: what is in the queue, and what the accounting has of jobs that ended."""

from __future__ import annotations

import contextlib
import logging
import pwd
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from launcher.schedulers.base import Intent
from launcher.schedulers.commands import Silent, Unreachable, words
from launcher.schedulers.failures import is_without_configuration
from launcher.schedulers.patience import Patience
from launcher.schedulers.records import (
    SACCT_FORMAT,
    SACCT_OLD_FORMAT,
    SEPARATOR,
    SQUEUE_FORMAT,
    Record,
    parse_ends,
    parse_sacct,
    parse_squeue,
)

logger = logging.getLogger("launcher.schedulers")

# The system's limit for one argument is 131,072 bytes.
_LONGEST_ARGUMENT = 120_000
# What squeue tells is good without the accounting, whose own patience with its database is 45 s.
_ACCOUNTING_SECONDS = 10.0
# Slurm forgets a submission that no answer came to long before; this bounds what sacct looks through.
_OLDEST_INTENT = timedelta(days=7)

_ACCOUNTING = "Slurm's accounting"
_SQUEUE = ("squeue", "--noheader", "--states=all", f"--Format={SQUEUE_FORMAT}")
_SACCT = ("sacct", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}", "--allocations", "--duplicates")


class Questions:
    """Asks one Slurm, in an environment that cannot change what its commands mean."""

    def __init__(self, environment: Mapping[str, str], patience: Patience) -> None:
        # Otherwise long lists of an array's tasks are cut short.
        self._environment = {**environment, "SLURM_BITSTR_LEN": "0"}
        self._patience = patience
        self._format = SACCT_FORMAT
        # Why the accounting could not tell, where it should have.
        self.unaccounted: str | None = None

    def queue(self, job_ids: Sequence[str]) -> list[Record]:
        """What the queue has of some jobs.

        Raises
        ------
        Unreachable
            If nobody answers.
        """
        wanted = ",".join(dict.fromkeys(job_ids))
        # A list too long for one argument: all that there is, to choose from here.
        chosen = [f"--jobs={wanted}"] if len(wanted) <= _LONGEST_ARGUMENT else []
        return self._squeue(chosen)

    def queue_of(self, users: Iterable[str]) -> list[Record]:
        """What the queue has of some users' jobs; of everybody's, if one of them is not known here.

        Raises
        ------
        Unreachable
            If nobody answers.
        """
        named = sorted(set(users))
        whose = [f"--user={','.join(named)}"] if all(map(_is_known, named)) else []
        # Without `--all` squeue leaves out the jobs of hidden partitions, unless it is asked for them by id.
        return self._squeue(["--all", *whose])

    def accounting(self, job_ids: Sequence[str]) -> list[Record]:
        """What the accounting has of each life of some jobs; nothing where there is none, or no answer."""
        return self._sacct([f"--jobs={part}" for part in _parts(job_ids)])

    def ends(self, job_ids: Sequence[str]) -> dict[str, float]:
        """When jobs, or tasks of arrays, ended, as far as the queue or the accounting tells: in Unix seconds.

        Of an array that is when the last of its tasks did.

        Raises
        ------
        Unreachable
            If nobody answers.
        """
        environment = {**self._environment, "SLURM_TIME_FORMAT": "%s"}
        wanted = sorted({job_id.partition("_")[0] for job_id in job_ids})
        fields = f"JobArrayID:{SEPARATOR},EndTime:{SEPARATOR}"
        queue = ["squeue", "--noheader", "--states=all", f"--Format={fields}"]
        queue += [f"--jobs={part}" for part in _parts(wanted)[:1]]
        told = parse_ends(self._patience.ask(queue, environment).stdout)
        missing = [job_id for job_id in wanted if job_id not in told]
        if missing and self.unaccounted is None:
            accounting = [*_SACCT, "--format=JobID,End", *(f"--jobs={part}" for part in _parts(missing))]
            with contextlib.suppress(Unreachable):
                answer = self._patience.ask(
                    accounting, environment, who=_ACCOUNTING, timeout=_ACCOUNTING_SECONDS, again=False
                )
                told = parse_ends(answer.stdout) | told
        return told

    def accounting_since(self, intents: Sequence[Intent]) -> list[Record]:
        """What the accounting has of the jobs of some users since their first intent, a week at most."""
        now = datetime.now(UTC)
        recent = [intent for intent in intents if now - _time(intent) < _OLDEST_INTENT]
        if not recent:
            return []
        users = sorted({intent.user for intent in recent})
        whose = f"--user={','.join(users)}" if all(map(_is_known, users)) else "--allusers"
        # sacct reads a time in this machine's zone: the day before is early enough in every zone.
        since = min(map(_time, recent)) - timedelta(days=1)
        return self._sacct([whose, f"--starttime={since:%Y-%m-%d}"])

    def _squeue(self, options: Sequence[str]) -> list[Record]:
        answer = self._patience.ask([*_SQUEUE, *options], self._environment)
        # Asked for one job alone that it has forgotten, squeue calls the id invalid; that is no failure.
        if answer.code != 0 and "Invalid job id" not in answer.stderr:
            told = words(answer.stderr)
            raise Unreachable(
                f"there is no Slurm that this machine belongs to: {told}"
                if is_without_configuration(answer.stderr)
                else f"squeue failed: {told}"
            )
        return parse_squeue(answer.stdout)

    def _sacct(self, options: Sequence[str]) -> list[Record]:
        command = [*_SACCT, f"--format={self._format}", *options]
        try:
            answer = self._patience.ask(
                command,
                self._environment,
                who=_ACCOUNTING,
                timeout=_ACCOUNTING_SECONDS,
                again=False,
            )
        except Silent as error:
            self.unaccounted = error.message
            logger.warning("%s; going by the queue and the jobs' own marks", error.message)
            return []
        except Unreachable:
            return []  # no sacct on this machine; what squeue told is still good
        self.unaccounted = None
        if answer.code != 0 and "Invalid field" in answer.stderr and self._format == SACCT_FORMAT:
            self._format = SACCT_OLD_FORMAT
            return self._sacct(options)
        # Without accounting sacct exits 1; the job's own marks are what is left to go by.
        return parse_sacct(answer.stdout) if answer.code == 0 else []


def _parts(job_ids: Sequence[str]) -> list[str]:
    """Lists of ids, each short enough to be one argument: sacct takes several."""
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


def _time(intent: Intent) -> datetime:
    time = datetime.fromisoformat(intent.since)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
