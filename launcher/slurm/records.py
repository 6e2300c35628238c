"""Records of jobs, parsed from the answers of squeue and sacct. Pure functions.

The commands run in an environment without the user's own ``SQUEUE_*`` and ``SACCT_*``::

    squeue --noheader --states=all --Format=<SQUEUE_FORMAT> --jobs=…
    sacct --noheader --parsable2 --delimiter=<SEPARATOR> --allocations --duplicates --format=<SACCT_FORMAT> …
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.runs.paths import SCRIPT_SUFFIX, SUBMITTED
from launcher.slurm.notations import expand_tasks, normalize_elapsed
from launcher.slurm.states import State, state_of

# The unit separator: reasons and commands may hold any character that can be typed, newlines too.
SEPARATOR = "\x1f"

# For --Format, not --format: only the long form has the exit code. A field with a suffix and no width is
# neither padded nor cut. The command comes last, because it may hold anything.
_SQUEUE = (
    *("JobArrayID", "JobID", "State", "Reason", "NodeList"),
    *("TimeUsed", "exit_code", "RestartCnt", "UserName", "Command"),
)
SQUEUE_FORMAT = ",".join(f"{name}:{SEPARATOR}" for name in _SQUEUE)
_SACCT = (
    *("JobID", "JobIDRaw", "State", "Reason", "NodeList"),
    *("Elapsed", "ExitCode", "Submit", "User", "WorkDir", "SubmitLine"),
)
SACCT_FORMAT = ",".join(_SACCT)
# SubmitLine came with Slurm 21.08.
SACCT_OLD_FORMAT = ",".join(_SACCT[:-1])

# Slurm's word for a script that it could not start, and its number, which is no real signal.
LAUNCH_FAILURE = "JobLaunchFailure"
_LAUNCH_FAILED = 53
# The signals of Linux; numbers above are Slurm's own, such as 125 for memory that ran out.
_SIGNALS = range(1, 65)

_NOTHING = {"", "None", "(null)", "N/A", "None assigned", "Unknown", "INVALID"}
_JOB_ID = re.compile(r"(\d+)(?:\+\d+)?(?:_(\d+|\[[-0-9,:]+(?:%\d+)?(?:\.\.\.)?\]?))?")
_SCRIPT = re.compile(rf"(\S.*?{re.escape(SCRIPT_SUFFIX)})(?= |\Z)", re.DOTALL)
# The name that a launch's script is submitted under (`submitted_name`), with or without its arguments.
_SUBMITTED = re.compile(
    rf"/{SUBMITTED}/(?P<tag>[\w.-]+)\.(?P<link>[1-9]\d*){re.escape(SCRIPT_SUFFIX)}(?: (?:\d+ )?(?P=tag))?\Z",
    re.ASCII,
)
# Launches before that name had only the tag as an argument, after the link's number from the second link on.
_ARGUMENTS = re.compile(r"(?: (?P<link>[1-9]\d*))? (?P<tag>[\w.-]+)\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Record:
    """A job, a task of an array, several tasks that wait together (``9_[3-5%1]``), or one attempt of these.

    `word` and `reason` are Slurm's; `raw_id` is the id of this one alone for Slurm's commands; `command` is
    the script, with its arguments before Slurm 23.02; in the accounting, which alone has `work_dir`, it is
    sbatch with its arguments. `exit_code` is as in a shell.
    """

    job_id: str
    raw_id: str
    word: str
    reason: str | None
    nodes: str | None
    elapsed: str | None
    exit_code: int | None
    restarts: int
    user: str
    command: str
    work_dir: str | None = None

    @property
    def state(self) -> State:
        return state_of(self.word)

    @property
    def parent_id(self) -> str:
        """Return the id of the job, or of the array that the task belongs to."""
        return self.job_id.partition("_")[0]

    @property
    def task(self) -> str | None:
        """Return the numbers of the array's tasks, ``2`` or ``3-5``; ``None`` for other jobs."""
        task = self.job_id.partition("_")[2].strip("[]").partition("%")[0]
        return task or None

    @property
    def tag(self) -> str | None:
        """Return the tag of the job's launch, or of its sweep's array; any word for a foreign job."""
        match = self._submission
        return match["tag"] if match else None

    @property
    def link(self) -> int:
        """Return the number of the job in its chain, from 1 on."""
        match = self._submission
        return int(match["link"] or 1) if match else 1

    @property
    def _submission(self) -> re.Match[str] | None:
        return _SUBMITTED.search(self.command) or _ARGUMENTS.search(self.command)


def parse_squeue(text: str) -> list[Record]:
    """Parse squeue's answer in `SQUEUE_FORMAT`; skip other lines."""
    return [
        # Text after the command is not Slurm's, but a notice of a site's wrapper.
        _record(shared, user, command.rpartition(SEPARATOR)[0] or command, restarts=restarts)
        for *shared, restarts, user, command in _rows(text, len(_SQUEUE))
    ]


def parse_sacct(text: str) -> list[Record]:
    """Parse sacct's answer in `SACCT_FORMAT` or `SACCT_OLD_FORMAT`: all attempts, oldest first."""
    dated = [
        (submitted, _record(shared, user, command, work_dir=work_dir))
        for *shared, submitted, user, work_dir, command in _rows(text, len(_SACCT))
    ]
    # Slurm writes a new submit time for each attempt.
    return [record for _, record in sorted(dated, key=lambda item: item[0])]


def _record(
    shared: Sequence[str], user: str, command: str, *, restarts: str = "0", work_dir: str | None = None
) -> Record:
    """Return the record of a row; both answers share the first fields."""
    job_id, raw_id, word, reason, nodes, elapsed, code = shared
    # This exit code is Slurm's mark of a failed launch.
    why = LAUNCH_FAILURE if code == f"0:{_LAUNCH_FAILED}" else _value(reason)
    return Record(
        job_id=job_id,
        raw_id=raw_id,
        word=word,
        reason=why,
        nodes=_value(nodes),
        elapsed=normalize_elapsed(elapsed),
        exit_code=_exit_code(code),
        restarts=int(restarts) if restarts.isdigit() else 0,
        user=user,
        command=command,
        work_dir=work_dir,
    )


def parse_ends(text: str) -> dict[str, float]:
    """Parse the ends of jobs, arrays and tasks, in Unix seconds; an array ends with its last task."""
    ends: dict[str, float] = {}
    for line in text.split("\n"):
        job_id, _, end = line.rstrip(SEPARATOR).partition(SEPARATOR)
        if not _JOB_ID.fullmatch(job_id) or not end.isascii() or not end.isdecimal():
            continue
        parent, _, tasks = job_id.partition("_")
        numbers = expand_tasks(tasks.strip("[]").partition("%")[0]) if tasks else []
        for name in (parent, *(f"{parent}_{number}" for number in numbers)):
            ends[name] = max(ends.get(name, 0.0), float(end))
    return ends


def group_by_job(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by the id of their job or array."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.parent_id, []).append(record)
    return groups


def script_of(record: Record) -> Path | None:
    """Return the submitted script of a job of Slipway's; ``None`` for other jobs."""
    if record.work_dir is None:
        match = _SCRIPT.match(record.command)
        return Path(match[1]) if match else None
    # sbatch and its options come first, so the last word counts from which a path can be read.
    starts = [match.end() for match in re.finditer(" ", record.command)]
    matches = [match for start in starts if (match := _SCRIPT.match(record.command, start))]
    whole = [match[1] for match in matches if match[1].startswith("/")]
    if whole:
        return Path(whole[-1])
    return Path(record.work_dir, matches[-1][1]) if matches else None


def _rows(text: str, fields: int) -> Iterator[list[str]]:
    """Yield the rows; a line that does not begin like a job continues the command of the row before."""
    rows: list[list[str]] = []
    for line in text.split("\n"):
        parts = line.split(SEPARATOR, fields - 1)
        if len(parts) >= fields - 1 and _JOB_ID.fullmatch(parts[0].strip()):
            rows.append([*(part.strip() for part in parts[: fields - 1]), *parts[fields - 1 :]])
        elif rows and len(rows[-1]) == fields and line:
            rows[-1][-1] += f"\n{line}"
    return (row if len(row) == fields else [*row, ""] for row in rows)


def _value(text: str) -> str | None:
    return None if text in _NOTHING else text


def _exit_code(text: str) -> int | None:
    """Convert ``exit:signal``, or a wait status (768 is 3, 9 is 137), to a shell's."""
    code, colon, number = text.partition(":")  # without a colon in squeue before 23.02
    if not code.isdigit() or (colon and not number.isdigit()):
        return None
    exit_code, signal = (int(code), int(number)) if colon else (int(code) >> 8, int(code) & 0x7F)
    if signal == 0:
        return exit_code
    return 128 + signal if signal in _SIGNALS and signal != _LAUNCH_FAILED else None
