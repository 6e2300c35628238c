"""The marks that a job leaves in its launch directory, for those who cannot ask the scheduler.

``marks/`` holds one pair of files for each life of the job, so that a requeued one writes over nothing::

    17.0.started.json   {"job_id": "17", "started": <Unix time>, "nodes": "n1,n2"}
    17.0.ended.json     {"job_id": "17", "exit_code": 0, "ended": <Unix time>}

A task of an array has its own, ``17_2.0.started.json``. Whoever cancels a job with Slipway leaves
``17.cancelled.json`` there: a job that never began leaves nothing itself, and one that did not who ended it.

``marks/job`` is the claim of the launch. Where the answer to a submission was lost there may be two jobs of
one launch, now or later: the one whose id (of an array, the array's) stands there is the launch's, and any
other leaves before it does anything. The first job that begins claims it; or the launcher does, for the job
that it puts on record, or for none at all (`GIVEN_UP`).

The links of a chain are jobs of one launch, and each has a claim of its own: ``marks/job``, ``marks/job.2``,
``marks/job.3``, made by the link itself when it begins, or by who submitted it. ``marks/chain-ended`` keeps
all that are still to come from doing anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.runs.files import umask, write_atomic
from launcher.runs.paths import CHAIN_ENDED_MARK, IMAGE_MARK, JOB_MARK, MARKS
from launcher.runs.reading import is_job_id, read_json, read_text, unix_time, whole

# In the claim: there is no job of this launch, and none may begin.
GIVEN_UP = "given-up"

# A list of ten thousand nodes, and what else a job tells.
_MARK_BYTES = 1 << 20
_COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
# Of the second link of a chain, or a further one.
_LATER_CLAIM = re.compile(rf"{JOB_MARK}\.([2-9]|[1-9][0-9]{{1,5}})", re.ASCII)
_HIGHEST_EXIT_CODE = 255

_STARTED, _ENDED, _CANCELLED = ".started.json", ".ended.json", ".cancelled.json"


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a job, from its start to its end; times in Unix seconds; ``None`` is not known.

    Attributes
    ----------
    job_id
        ``17``, or ``17_2`` of an array's task.
    number
        Counts the requeues.
    nodes
        Their names, separated by commas.
    link
        Which job of its chain it was, from 1 on.
    checkpoint
        The step of the newest checkpoint when it began.
    failures
        How many links in a row had ended before it without a new checkpoint.
    avoids
        Nodes that it was not to run on, separated by commas.
    state
        Slurm's word for the job when its tasks had ended.
    signal
        What the script was sent while its tasks ran, such as ``USR1``.
    rank, host
        The first rank that failed, and its node.
    step
        The last step that is known to be done.
    rule
        The name of the rule of `launcher.failures.rules` that a line of its log is after.
    verdict
        ``done``, ``continue``, ``exclude`` (and continue) or ``stop``.
    excluded
        The nodes that the verdict names.
    why
        The verdict's reason, a sentence.
    tag
        That of the job's script; a job of an earlier version tells none.
    """

    job_id: str
    number: int
    nodes: str | None = None
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    link: int = 1
    checkpoint: int | None = None
    failures: int = 0
    avoids: str | None = None
    state: str | None = None
    signal: str | None = None
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    rule: str | None = None
    verdict: str | None = None
    excluded: str | None = None
    why: str | None = None
    tag: str | None = None

    @property
    def task(self) -> str | None:
        """The number of an array's task."""
        return self.job_id.partition("_")[2] or None

    def is_of(self, tags: Collection[str]) -> bool:
        """Return False if its job tells a tag that is none of these, those of a launch."""
        return not tags or self.tag is None or self.tag in tags

    @property
    def is_over(self) -> bool:
        return self.exit_code is not None


def read_lives(launch_dir: Path, job_id: str | None = None, tags: Collection[str] = ()) -> list[Life]:
    """The lives of a launch's job in the order in which they began.

    Parameters
    ----------
    job_id
        That of the job, of the array or of one task of it; lives of another job are passed over.
    tags
        Those of the launch: a life that tells another tag is of a launch that was here before.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in _files(launch_dir / MARKS):
        stem = path.name.removesuffix(_STARTED).removesuffix(_ENDED)
        found.setdefault(stem, {}).update(_read(path))
    lives = [life for stem, content in found.items() if (life := _life(stem, content))]
    return _in_order(
        life
        for life in lives
        if job_id in (None, life.job_id, life.job_id.partition("_")[0]) and life.is_of(tags)
    )


def _in_order(lives: Iterable[Life]) -> list[Life]:
    """By when they began; but a job's own by their numbers, because the clocks of hosts differ."""
    numbered = sorted(lives, key=lambda life: life.number)
    newest: dict[str, float] = {}
    begun: dict[Life, float] = {}
    for life in numbered:
        told = life.started or life.ended or 0.0
        begun[life] = newest[life.job_id] = max(told, newest.get(life.job_id, 0.0))
    return sorted(numbered, key=begun.__getitem__)


def note_cancelled(launch_dir: Path, job_id: str, user: str) -> None:
    """Leave the mark that a job was cancelled, by whom and when; where that is not possible, none is left."""
    with contextlib.suppress(OSError):
        (launch_dir / MARKS).mkdir(exist_ok=True)
        told = {"job_id": job_id, "user": user, "cancelled": round(time.time())}
        write_atomic(launch_dir / MARKS / f"{job_id}{_CANCELLED}", json.dumps(told) + "\n")


def cancelled_by(launch_dir: Path, job_id: str) -> str | None:
    """Who cancelled a job with Slipway; ``None`` if nobody did."""
    user = _read(launch_dir / MARKS / f"{job_id}{_CANCELLED}").get("user")
    return user if isinstance(user, str) and user else None


def cancelled_at(launch_dir: Path, job_id: str) -> float | None:
    """When a job was cancelled with Slipway, in Unix seconds; ``None`` if it was not."""
    return unix_time(_read(launch_dir / MARKS / f"{job_id}{_CANCELLED}").get("cancelled"))


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Why no further link of a chain does anything, who decided it, ``job 17`` or a user's name, and when.

    The time is in Unix seconds; ``None`` is now.
    """

    by: str
    why: str
    ended: float | None = None


def end_chain(launch_dir: Path, end: ChainEnd) -> bool:
    """Keep all links that have not begun from doing anything; return False if the chain has ended already.

    Raises
    ------
    OSError
        If that cannot be written: the next link would go on.
    """
    (launch_dir / MARKS).mkdir(exist_ok=True)
    ended = time.time() if end.ended is None else end.ended
    told = {"by": end.by, "why": end.why, "ended": int(ended)}
    return _write_once(launch_dir / MARKS, CHAIN_ENDED_MARK, json.dumps(told))


def take_back_end(launch_dir: Path) -> None:
    """Let a chain go on that was ended a moment ago, to cancel it, and whose jobs then were not cancelled."""
    with contextlib.suppress(OSError):
        (launch_dir / MARKS / CHAIN_ENDED_MARK).unlink()


def chain_end(launch_dir: Path) -> ChainEnd | None:
    """Why a launch's chain has ended; ``None`` as long as it has not."""
    told = _read(launch_dir / MARKS / CHAIN_ENDED_MARK)
    if not told:
        return None
    return ChainEnd(str(told.get("by", "")), str(told.get("why", "")), unix_time(told.get("ended")))


def link_jobs(launch_dir: Path) -> list[str]:
    """The ids of the jobs of a launch's chain in their order, as far as they are known."""
    first = first_job(launch_dir)
    return [*([first] if first else []), *later_jobs(launch_dir).values()]


def later_jobs(launch_dir: Path, tags: Collection[str] = ()) -> dict[int, str]:
    """The same without the first, which the launcher knows, by the numbers of their links.

    A claim that could not be written, as on a full disk, hides none after it; its job's own marks stand in.
    `tags` is as in `read_lives`.
    """
    names = _names(launch_dir / MARKS)
    links = [int(match[1]) for name in names if (match := _LATER_CLAIM.fullmatch(name))]
    found = {link: job for link in links if (job := _job_in(_claimed(launch_dir, link)))}
    marked = {name.partition(".")[0] for name in names if name.endswith((_STARTED, _ENDED))}
    unclaimed = marked - {first_job(launch_dir), *found.values()}
    if unclaimed:
        for life in read_lives(launch_dir, tags=tags):
            if life.job_id in unclaimed and life.link > 1:  # a script that was submitted by hand says 1
                found.setdefault(life.link, life.job_id)
    return dict(sorted(found.items()))


def first_job(launch_dir: Path) -> str | None:
    """The id of the job that has claimed a launch; ``None`` as long as none has."""
    return _job_in(_claimed(launch_dir))


def _job_in(claimed: str | None) -> str | None:
    return claimed if claimed and is_job_id(claimed) and "_" not in claimed else None


def claim(launch_dir: Path, holder: str, link: int = 1) -> str:
    """Claim a launch for a job, or for none (`GIVEN_UP`), unless it is claimed already; return who has it.

    Of a chain it is a `link` that is claimed.

    Where nothing can be read or written, that is `holder`: a mark that cannot be left stops nobody.
    """
    directory = launch_dir / MARKS
    with contextlib.suppress(OSError):
        directory.mkdir(exist_ok=True)
        _write_once(directory, _claim_name(link), holder)
    return _claimed(launch_dir, link) or holder


def _write_once(directory: Path, name: str, content: str) -> bool:
    """Write a mark unless it is there: whoever comes first writes it. Return True if that is this call."""
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=f".{JOB_MARK}-") as whole:
        os.fchmod(whole.fileno(), 0o666 & ~umask())
        whole.write(f"{content}\n")
        whole.flush()
        # A link, so that the mark is there with its content, or not at all.
        try:
            (directory / name).hardlink_to(whole.name)
        except FileExistsError:
            return False
        except OSError:  # no links on this file system
            try:
                with (directory / name).open("x") as mark:
                    mark.write(f"{content}\n")
            except FileExistsError:
                return False
    return True


def _claim_name(link: int) -> str:
    return JOB_MARK if link == 1 else f"{JOB_MARK}.{link}"


def _claimed(launch_dir: Path, link: int = 1) -> str | None:
    try:
        return read_text(launch_dir / MARKS / _claim_name(link), _MARK_BYTES).strip() or None
    except (OSError, ValueError):
        return None


def image_digest(launch_dir: Path) -> str | None:
    """The digest of the image file that a launch ran in, as its job read it: ``sha256:…``."""
    try:
        words = read_text(launch_dir / MARKS / IMAGE_MARK, _MARK_BYTES).split()
    except (OSError, ValueError):
        return None
    return f"sha256:{words[0]}" if words else None


def _files(directory: Path) -> list[Path]:
    return [directory / name for name in _names(directory) if name.endswith((_STARTED, _ENDED))]


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir() if path.name[0] != ".")
    except OSError:
        return []


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path, _MARK_BYTES)
    except (OSError, ValueError):
        return {}


def _life(stem: str, content: Mapping[str, Any]) -> Life | None:
    job_id, _, number = stem.rpartition(".")
    if not (is_job_id(job_id) and _COUNT.fullmatch(number) and content):
        return None
    return Life(
        job_id=job_id,
        number=int(number),
        started=unix_time(content.get("started")),
        ended=unix_time(content.get("ended")),
        link=whole(content.get("link"), 1) or 1,
        failures=whole(content.get("failures"), 0) or 0,
        exit_code=whole(content.get("exit_code"), 0, _HIGHEST_EXIT_CODE),
        checkpoint=whole(content.get("checkpoint"), 0),
        rank=whole(content.get("rank"), 0),
        step=whole(content.get("step"), 0),
        nodes=_text(content, "nodes"),
        avoids=_text(content, "avoids"),
        state=_text(content, "state"),
        signal=_text(content, "signal"),
        host=_text(content, "host"),
        rule=_text(content, "rule"),
        verdict=_text(content, "verdict"),
        excluded=_text(content, "excluded"),
        why=_text(content, "why"),
        tag=_text(content, "tag"),
    )


def _text(content: Mapping[str, Any], key: str) -> str | None:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value) or None
