"""The marks that a job leaves in its launch directory, for those who cannot ask the scheduler.

``marks/`` holds one pair of files for each attempt of the job, so that a requeued one writes over nothing::

    17.0.started.json   {"job_id": "17", "tag": "…", "started": <Unix time>, "nodes": "n1,n2"}
    17.0.ended.json     {"job_id": "17", "tag": "…", "exit_code": 0, "ended": <Unix time>}

Where the tasks were started again inside of their job, ``17.0.restarted-1.json`` has the end of those before,
with the judgement, and the start of the new ones; the end of the last is that of the job.

A task of an array has its own, ``17_2.0.started.json``. Whoever cancels a job with Slipway leaves
``17.cancelled.json`` there: a job that never began leaves nothing itself, and one that did not who ended it.

``marks/job`` is the claim of the launch. Where the answer to a submission was lost there may be two jobs of
one launch, now or later: the one whose id (of an array, the array's) it has is the launch's, and any
other leaves before it does anything. The first job that begins claims it; or the launcher does, for the job
that it records, or for no job (`GIVEN_UP`).

The links of a chain are jobs of one launch, and each has its own claim: ``marks/job``, ``marks/job.2``,
``marks/job.3``, written by the link when it starts or by its submitter; a full disk may leave none.
``marks/chain-ended`` keeps all that are still to come from doing anything.
"""

import contextlib
import json
import os
import re
import time
from typing import Any, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional

from slipway.common.files import (
    AnyPath,
    is_job_id,
    names_in,
    read_int,
    read_json,
    read_text,
    sync_file,
    to_printable,
    unix_time,
    write_atomic,
    write_once,
)
from slipway.common.node.settings import why_lost

MARKS = "marks"
STARTED, ENDED, CANCELLED, RESTARTED = "started", "ended", "cancelled", "restarted"
JOB = "job"
CHAIN_ENDED = "chain-ended"
IMAGE = "image.sha256"
# Beside it: what the ranks said in each hang.
HANGS = "hangs"

# In the claim: there is no job of this launch, and none may begin.
GIVEN_UP = "given-up"

# Characters quoted of a mark, which others may write, in a log and in another mark.
_MAX_QUOTED_CHARS = 1000
# A list of ten thousand nodes, and the other fields.
_MARK_BYTES = 1 << 20
# Patterns are compiled when they are needed: the tasks start sooner.
_COUNT = r"[0-9]{1,9}"
_HIGHEST_EXIT_CODE = 255
_NUMBERS = ("checkpoint", "checkpoint_order", "checkpoint_time", "rank", "step")
_TEXTS = (
    "nodes", "avoids", "left_out", "state", "signal", "host", "rule", "verdict", "excluded", "why", "tag",
)  # fmt: skip
_LIFE_MARK = rf"(?s)([^.].*)\.({STARTED}|{ENDED}|{RESTARTED}-{_COUNT})\.json"
_OF_START = (
    *("started", "nodes", "left_out", "avoids", "link", "failures"),
    *("checkpoint", "checkpoint_order", "checkpoint_time"),
)
_OF_END = (
    *("ended", "exit_code", "signal", "state", "rank", "host", "step", "rule", "verdict", "excluded", "why"),
)
# Claims of the second link of a chain, or a further one; with the job's id in its name one that is empty.
_LATER_CLAIM = rf"{JOB}\.([2-9]|[1-9][0-9]{{1,5}})"
_EMPTY_CLAIM = rf"{_LATER_CLAIM}\.([0-9]{{1,12}})"


class JobAttempt(NamedTuple):
    """One attempt of a job, from its start to its end; times in Unix seconds; ``None`` is not known.

    Attributes
    ----------
    job_id
        ``17``, or ``17_2`` of an array's task.
    number
        Counts the requeues.
    tag
        That of the launch; missing from jobs of earlier versions.
    nodes
        Their names, separated by commas.
    link
        Which job of its chain it was, from 1 on.
    checkpoint
        The step of the newest checkpoint when it began.
    checkpoint_order, checkpoint_time
        The same checkpoint's place in its trainer's own order, and its time in Unix nanoseconds.
    failures
        How many links in a row had ended before it without a new checkpoint.
    avoids
        Nodes that it was not to run on, separated by commas.
    left_out
        Nodes of its own that its tasks did not run on, each with the reason.
    state
        Slurm's word for the job when its tasks had ended.
    signal
        The signal that the job was sent while its tasks ran, such as ``USR1``.
    rank, host
        The first rank that failed, and its node.
    step
        The last step that is known to be done.
    rule
        The name of the rule of `slipway.common.node.failure_rules` that matched.
    verdict
        ``done``, ``continue``, ``exclude`` (and continue) or ``stop``.
    excluded
        The nodes that the verdict names.
    why
        The verdict's reason, a sentence.
    restarts
        Number of times that its tasks had been started again inside of the job.
    """

    job_id: str
    number: int
    nodes: Optional[str] = None
    started: Optional[float] = None
    ended: Optional[float] = None
    exit_code: Optional[int] = None
    link: int = 1
    checkpoint: Optional[int] = None
    checkpoint_order: Optional[int] = None
    checkpoint_time: Optional[int] = None
    failures: int = 0
    avoids: Optional[str] = None
    left_out: Optional[str] = None
    state: Optional[str] = None
    signal: Optional[str] = None
    rank: Optional[int] = None
    host: Optional[str] = None
    step: Optional[int] = None
    rule: Optional[str] = None
    verdict: Optional[str] = None
    excluded: Optional[str] = None
    why: Optional[str] = None
    tag: Optional[str] = None
    restarts: int = 0

    @property
    def task(self) -> Optional[str]:
        """The number of an array's task."""
        return self.job_id.partition("_")[2] or None

    @property
    def stem(self) -> str:
        """The beginning of the names of its marks."""
        return f"{self.job_id}.{self.number}"

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None

    def is_of(self, tags: Collection[str]) -> bool:
        """Return False if its job has a tag that is not among these, a launch's."""
        return not tags or self.tag is None or self.tag in tags


def read_attempts(
    launch_dir: AnyPath, job_id: Optional[str] = None, tags: Collection[str] = (), *, each_start: bool = False
) -> List[JobAttempt]:
    """Read the attempts of a launch's job in the order in which they began.

    Parameters
    ----------
    job_id
        That of the job, of the array or of one task of it; attempts of another job are passed over.
    tags
        Those of the launch: an attempt with another tag is of a launch that was here before.
    each_start
        Return each start of the tasks as an attempt of its own; otherwise one attempt for all of them, with
        the nodes and the checkpoint of the last, and the end of the job.
    """
    contents: Dict[str, Dict[str, Mapping[str, Any]]] = {}
    for name in names_in(_path(launch_dir)):
        match = re.fullmatch(_LIFE_MARK, name)
        if match:
            contents.setdefault(match[1], {})[match[2]] = _read(_path(launch_dir, name))
    attempts = [
        _attempt(stem, fields)
        for stem, marks in contents.items()
        for fields in _split_starts(marks, each_start)
    ]
    return _sort_attempts(
        attempt
        for attempt in attempts
        if attempt
        and job_id in (None, attempt.job_id, attempt.job_id.partition("_")[0])
        and attempt.is_of(tags)
    )


def _split_starts(marks: Mapping[str, Mapping[str, Any]], each_start: bool) -> List[Dict[str, Any]]:
    """Return the fields of each start of an attempt's tasks up to its end; all in one without `each_start`.

    A mark of a new start has the end before it as well; the start is missing if the supervisor died, or gave
    up, between the two.
    """
    begun, ended = marks.get(STARTED, {}), marks.get(ENDED, {})
    again = sorted((int(name.rpartition("-")[2]), mark) for name, mark in marks.items() if "-" in name)
    if not again:
        return [{**ended, **begun}]
    starts = [_select(begun, _OF_START)]
    for number, mark in again:
        starts[-1].update(_select(mark, _OF_END))
        if "started" in mark:
            starts.append(dict(_select(mark, _OF_START), restarts=number))
    starts[-1].update(_select(ended, _OF_END))
    if not each_start:  # between two starts the job goes on
        last = _select(starts[-1], (*_OF_START, "restarts"))
        starts = [{**last, **_select(ended, _OF_END), "started": begun.get("started")}]
    common = _select({**ended, **again[0][1], **begun}, ("job_id", "tag"))
    return [dict(common, **start) for start in starts]


def _select(mark: Mapping[str, Any], names: Collection[str]) -> Dict[str, Any]:
    return {name: mark[name] for name in names if name in mark}


def _sort_attempts(attempts: Iterable[JobAttempt]) -> List[JobAttempt]:
    """Sort by when they began; but a job's own by their numbers, because the clocks of hosts differ."""
    numbered = sorted(attempts, key=lambda attempt: attempt.number)
    newest: Dict[str, float] = {}
    begun: Dict[JobAttempt, float] = {}
    for attempt in numbered:
        moment = attempt.started or attempt.ended or 0.0
        begun[attempt] = newest[attempt.job_id] = max(moment, newest.get(attempt.job_id, 0.0))
    return sorted(numbered, key=begun.__getitem__)


def make_directory(launch_dir: AnyPath) -> None:
    """Make the directory of marks if it is missing, but no launch directory: it may have been removed.

    Raises
    ------
    OSError
        If it cannot be made, or is a link: another user may lead it anywhere.
    """
    try:
        os.mkdir(_path(launch_dir))
    except FileExistsError:
        if os.path.islink(_path(launch_dir)):
            raise


def leave(
    launch_dir: AnyPath,
    attempt: str,
    name: str,
    tag: str,
    fields: Mapping[str, Any],
    *,
    once: bool = False,
    sync: bool = True,
) -> bool:
    """Leave a mark of one attempt of a job; return False where that is not possible, as on a full disk.

    Nothing is left in the directory of another launch, which took the place of one that was deleted or moved.

    Parameters
    ----------
    attempt
        The job's id and the number of its requeues, ``17.0`` or ``17_2.0``: `JobAttempt.stem`.
    name
        `STARTED` or `ENDED`.
    tag
        That of the launch.
    fields
        What `JobAttempt` has them for; those that are ``None`` or empty are left out.
    once
        Write over no mark: return False if there is one.
    sync
        Wait until it is durable; otherwise `sync_mark` does later.
    """
    content = {"job_id": attempt.rpartition(".")[0].partition("_")[0], "tag": tag}
    content.update((key, value) for key, value in fields.items() if value is not None and value != "")
    path, text = _path(launch_dir, f"{attempt}.{name}.json"), json.dumps(content) + "\n"
    if why_lost(launch_dir, tag):
        return False
    try:
        if once:
            return write_once(path, text)
        write_atomic(path, text, sync=sync)
    except OSError:
        return False
    return True


def time_limit(launch_dir: AnyPath, attempt: str) -> Optional[int]:
    """Return the seconds that Slurm granted an attempt of a job; ``None`` without it in its mark."""
    return read_int(_read(_path(launch_dir, f"{attempt}.{STARTED}.json")).get("time_limit"), 1)


def sync_mark(launch_dir: AnyPath, attempt: str, name: str) -> None:
    """Make a mark durable that was left without `sync`, as far as that is possible."""
    with contextlib.suppress(OSError):
        sync_file(_path(launch_dir, f"{attempt}.{name}.json"))


def note_cancelled(launch_dir: AnyPath, job_id: str, user: str) -> None:
    """Leave the mark that a job was cancelled, by whom and when; where that is not possible, none is left."""
    with contextlib.suppress(OSError):
        make_directory(launch_dir)
        content = {"job_id": job_id, "user": user, "cancelled": round(time.time())}
        write_atomic(_path(launch_dir, f"{job_id}.{CANCELLED}.json"), json.dumps(content) + "\n")


def cancelled_by(launch_dir: AnyPath, job_id: str) -> Optional[str]:
    """Return the user who cancelled a job with Slipway, or ``None``."""
    user = _read(_path(launch_dir, f"{job_id}.{CANCELLED}.json")).get("user")
    return user if isinstance(user, str) and user else None


def cancelled_at(launch_dir: AnyPath, job_id: str) -> Optional[float]:
    """Return when a job was cancelled with Slipway, in Unix seconds; ``None`` if it was not."""
    return unix_time(_read(_path(launch_dir, f"{job_id}.{CANCELLED}.json")).get("cancelled"))


class ChainEnd(NamedTuple):
    """The end of a chain: why no further link does anything, by whom (``job 17`` or a user's name), and when.

    The time is in Unix seconds; ``None`` is now.
    """

    by: str
    why: str
    ended: Optional[float] = None

    @property
    def sentence(self) -> str:
        return quote(f"{self.by} ended the chain: {self.why}")


def end_chain(launch_dir: AnyPath, end: ChainEnd) -> bool:
    """Keep all links that have not begun from doing anything; return False if the chain has ended already.

    Raises
    ------
    OSError
        If that cannot be written: the next link would go on.
    """
    make_directory(launch_dir)
    ended = time.time() if end.ended is None else end.ended
    content = {"by": end.by, "why": end.why, "ended": int(ended)}
    return write_once(_path(launch_dir, CHAIN_ENDED), json.dumps(content) + "\n")


def take_back_end(launch_dir: AnyPath) -> None:
    """Let a chain go on that was just ended to cancel it, if its jobs were not cancelled."""
    with contextlib.suppress(OSError):
        os.unlink(_path(launch_dir, CHAIN_ENDED))


def chain_end(launch_dir: AnyPath) -> Optional[ChainEnd]:
    """Return why a launch's chain has ended; ``None`` as long as it has not."""
    content = _read(_path(launch_dir, CHAIN_ENDED))
    if not content:
        return None
    return ChainEnd(str(content.get("by", "")), str(content.get("why", "")), unix_time(content.get("ended")))


def link_jobs(launch_dir: AnyPath) -> List[str]:
    """Return the ids of the jobs of a launch's chain in their order, as far as they are known."""
    first = job_of(launch_dir)
    return [*([first] if first else []), *later_jobs(launch_dir).values()]


def later_jobs(launch_dir: AnyPath, tags: Collection[str] = ()) -> Dict[int, str]:
    """Return the jobs of a launch's later links by their numbers; the launcher knows the first.

    A claim that could not be written, as on a full disk, hides no later one: an empty one or its job's own
    marks replace it. `tags` is as in `read_attempts`.
    """
    names = names_in(_path(launch_dir))
    matches = (re.fullmatch(_LATER_CLAIM, name) for name in names)
    links = [int(match[1]) for match in matches if match]
    claimed = {link: job_of(launch_dir, link) for link in links}
    jobs = {link: job for link, job in claimed.items() if job}
    for match in (re.fullmatch(_EMPTY_CLAIM, name) for name in names):
        if match:
            jobs.setdefault(int(match[1]), match[2])
    marked = {name.partition(".")[0] for name in names if re.fullmatch(_LIFE_MARK, name)}
    unclaimed = marked - {job_of(launch_dir), *jobs.values()}
    if unclaimed:
        for attempt in read_attempts(launch_dir, tags=tags):
            if attempt.job_id in unclaimed and attempt.link > 1:  # a script that was submitted by hand says 1
                jobs.setdefault(attempt.link, attempt.job_id)
    return dict(sorted(jobs.items()))


def job_of(launch_dir: AnyPath, link: int = 1) -> Optional[str]:
    """Return the id of the job that has claimed a link; ``None`` as long as none has."""
    claimed = claimant(launch_dir, link)
    return claimed if claimed and is_job_id(claimed) and "_" not in claimed else None


def claimant(launch_dir: AnyPath, link: int = 1) -> Optional[str]:
    """Return the holder of a link's claim: a job's id or `GIVEN_UP`; ``None`` if it is unclaimed."""
    try:
        return read_text(_path(launch_dir, _claim_name(link)), _MARK_BYTES).strip() or None
    except (OSError, ValueError):
        return None


def claim(launch_dir: AnyPath, holder: str, link: int = 1) -> str:
    """Claim a launch, or a chain's `link`, for a job or for none (`GIVEN_UP`); return the claim's holder.

    Without a readable claim that is `holder`: a mark that cannot be written stops no job.
    A full disk mostly still takes an empty file: its name has the id then.
    """
    path = _path(launch_dir, _claim_name(link))
    with contextlib.suppress(OSError):
        make_directory(launch_dir)
        try:
            write_once(path, f"{holder}\n")
        except OSError:
            if link == 1:  # the launcher knows the first
                raise
            os.close(os.open(f"{path}.{holder}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    return claimant(launch_dir, link) or holder


def leave_image_digest(launch_dir: AnyPath, digest: str) -> bool:
    """Leave the SHA-256 of the image file; return False where that is not possible."""
    try:
        write_atomic(_path(launch_dir, IMAGE), f"{digest}\n")
    except OSError:
        return False
    return True


def image_digest(launch_dir: AnyPath) -> Optional[str]:
    """Return the digest of the image file that a launch ran in, as its job read it: ``sha256:…``."""
    try:
        words = read_text(_path(launch_dir, IMAGE), _MARK_BYTES).split()
    except (OSError, ValueError):
        return None
    return f"sha256:{words[0]}" if words else None


def quote(text: str) -> str:
    """Return a text that others may have written as one line of limited length."""
    return to_printable(text)[:_MAX_QUOTED_CHARS]


def _claim_name(link: int) -> str:
    return JOB if link == 1 else f"{JOB}.{link}"


def _path(launch_dir: AnyPath, *name: str) -> str:
    return os.path.join(launch_dir, MARKS, *name)


def _read(path: AnyPath) -> Mapping[str, Any]:
    try:
        return read_json(path, _MARK_BYTES)
    except (OSError, ValueError):
        return {}


def _attempt(stem: str, content: Mapping[str, Any]) -> Optional[JobAttempt]:
    job_id, _, number = stem.rpartition(".")
    if not (is_job_id(job_id) and re.fullmatch(_COUNT, number) and content):
        return None
    fields: Dict[str, Any] = {name: read_int(content.get(name), 0) for name in _NUMBERS}
    fields.update((name, _text(content, name)) for name in _TEXTS)
    return JobAttempt(
        job_id=job_id,
        number=int(number),
        started=unix_time(content.get("started")),
        ended=unix_time(content.get("ended")),
        link=read_int(content.get("link"), 1) or 1,
        failures=read_int(content.get("failures"), 0) or 0,
        restarts=read_int(content.get("restarts"), 0) or 0,
        exit_code=read_int(content.get("exit_code"), 0, _HIGHEST_EXIT_CODE),
        **fields,
    )


def _text(content: Mapping[str, Any], key: str) -> Optional[str]:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    return str(value) or None
