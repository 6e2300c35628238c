"""The runs that this user has seen: a cache for quick look-ups, rebuilt from manifests at any time.

It knows directories with runs (trees), and launches by their tags. It is never the truth: each result is
compared with the manifest. Nothing that happens to the cache is an error: it may be deleted, broken, of
another version, or on a full disk. It lies on this machine's own disk, in a directory that nobody else can
write: ``$SLIPWAY_CACHE_DIR``, else ``/var/tmp/slipway-<uid>``. The home is often on the network, where locks
are slow or do not work.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.runs.manifest import Manifest, find_manifest
from launcher.runs.paths import LAUNCHES, MANIFEST
from launcher.runs.trust import is_own, usable_slurm_conf
from slipway.common.files import write_atomic

CACHE_VARIABLE = "SLIPWAY_CACHE_DIR"
_SHARED = Path("/var/tmp")


class NotTrusted(Exception):
    """The cache's directory belongs to somebody else, or is open to others; the message says what to do."""


def cache_directory() -> Path:
    """Return the directory of the cache; create it if it is missing.

    Raise `NotTrusted` if others can write it, as they may have put anything there; OSError if it cannot be
    created.
    """
    path = os.environ.get(CACHE_VARIABLE)
    if path:
        # The user's own choice, so links in it are followed.
        directory = Path(path).expanduser().absolute()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = directory.resolve()
    else:
        directory = _SHARED / f"slipway-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    status = directory.lstat()  # no link is followed, which others may have made
    for is_wrong, why in (
        (not stat.S_ISDIR(status.st_mode), "is not a directory"),
        (status.st_uid != os.geteuid(), "belongs to somebody else"),
        (status.st_mode & 0o022, "can be written by others"),
    ):
        if is_wrong:
            hint = f"{CACHE_VARIABLE} names another directory"
            raise NotTrusted(f"{directory} {why}, so runs are not remembered there: {hint}")
    return directory


# Another version has another file: two versions of Slipway do not destroy each other's.
FILE_NAME = "runs-2.json"
_LOCK_SECONDS = 5.0  # for which another process may be writing


@dataclass(frozen=True, slots=True)
class Entry:
    """A launch as it was last seen; `job_id` is that of the job or the array, or ``17_2`` for a point.

    `slurm_conf` was trusted then, and is checked again before it is used: `usable_slurm_conf`.
    """

    tag: str
    run: str
    run_dir: Path
    number: int
    job_id: str | None
    scheduler: str
    slurm_conf: str | None
    user: str
    created: str

    @property
    def usable_slurm_conf(self) -> str | None:
        """Return the configuration of its Slurm; ``None``, the site's, if it is not trusted."""
        return usable_slurm_conf(self.manifest, self.slurm_conf)

    @property
    def manifest(self) -> Path:
        return self.run_dir / LAUNCHES / str(self.number) / MANIFEST

    @property
    def is_own(self) -> bool:
        """Return True if its manifest is a file of the caller's: others' may be copies of it."""
        return is_own(self.manifest)

    @property
    def is_there(self) -> bool:
        """Return True if the launch is still where it was seen."""
        try:
            return find_manifest(self.manifest.parent).tag == self.tag
        except UserError:
            return False


_FIELDS = tuple(field.name for field in fields(Entry))


def entry_of(run_dir: Path, number: int, manifest: Manifest, job_id: str | None) -> Entry:
    """Return the entry of a launch at its present place."""
    slurm_conf = usable_slurm_conf(run_dir / LAUNCHES / str(number) / MANIFEST, manifest.slurm_conf)
    own: dict[str, Any] = {"run_dir": run_dir, "number": number, "job_id": job_id, "slurm_conf": slurm_conf}
    return Entry(**own, **{name: getattr(manifest, name) for name in _FIELDS if name not in own})


@dataclass(frozen=True)
class _Content:
    """The content of the file; `silent` has the times at which clusters did not answer, by configuration."""

    trees: frozenset[Path] = frozenset()
    launches: Mapping[str, Entry] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: bytes) -> _Content:
        content = json.loads(text)
        entries = [Entry(**row | {"run_dir": Path(row["run_dir"])}) for row in content["launches"]]
        trees = frozenset(map(Path, content["trees"]))
        return cls(trees, {entry.tag: entry for entry in entries}, dict(content["silent"]))

    def to_json(self) -> str:
        rows = [{name: getattr(entry, name) for name in _FIELDS} for entry in self.launches.values()]
        return json.dumps({"trees": [*self.trees], "launches": rows, "silent": self.silent}, default=str)


class Index:
    """The cache of this user. No method raises: unreadable data are empty, unwritable data are lost.

    `trouble` says why the cache is not used, if the user should know.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None

    def trees(self) -> list[Path]:
        """Return the directories in which runs were seen."""
        return sorted(self._content.trees)

    def entries(self) -> list[Entry]:
        """Return all launches, the oldest first."""
        return sorted(self._content.launches.values(), key=lambda entry: (entry.created, entry.tag))

    def with_job(self, job_id: str) -> list[Entry]:
        """Return the launches that had a job of this id, or are points of such an array: ids are reused."""
        return [entry for entry in self.entries() if f"{entry.job_id}_".startswith(f"{job_id}_")]

    def with_tag(self, tag: str) -> Entry | None:
        """Return the launch of a tag."""
        return self._content.launches.get(tag)

    def silent_since(self, moment: float) -> dict[str, float]:
        """Return when clusters did not answer, by their configurations, since a moment."""
        return {conf: since for conf, since in self._content.silent.items() if since > moment}

    def note_silence(self, slurm_conf: str, moment: float | None) -> None:
        """Remember when a cluster did not answer; ``None`` means that it did."""
        own = {} if moment is None else {slurm_conf: moment}

        def note(content: _Content) -> _Content:
            others = {conf: since for conf, since in content.silent.items() if conf != slurm_conf}
            return replace(content, silent=others | own)

        self._change(note)

    def remember(self, entries: Iterable[Entry], trees: Iterable[Path] = ()) -> None:
        """Add launches that were seen just now, and the directories of their runs."""
        seen = {entry.tag: entry for entry in sorted(entries, key=lambda entry: entry.is_own)}
        trees = frozenset(trees)

        def add(content: _Content) -> _Content:
            known = content.launches
            news = {tag: entry for tag, entry in seen.items() if _is_news(entry, known.get(tag))}
            places = {entry.run_dir.parent for entry in news.values()}
            return replace(content, trees=content.trees | trees | places, launches={**known, **news})

        self._change(add)

    def forget(self, run_dirs: Iterable[Path] = (), trees: Iterable[Path] = ()) -> None:
        """Drop runs and trees that are gone."""
        gone, trees = set(run_dirs), frozenset(trees)

        def drop(content: _Content) -> _Content:
            left = {tag: entry for tag, entry in content.launches.items() if entry.run_dir not in gone}
            return replace(content, trees=content.trees - trees, launches=left)

        self._change(drop)

    @cached_property
    def _content(self) -> _Content:
        return self._read()

    def _read(self) -> _Content:
        try:
            return _Content.parse((cache_directory() / FILE_NAME).read_bytes())
        except NotTrusted as error:
            self.trouble = str(error)
            return _Content()
        except (OSError, ValueError, TypeError, KeyError, RecursionError):  # missing, or broken
            return _Content()

    def _change(self, change: Callable[[_Content], _Content]) -> None:
        """Change the file, unless nothing is new; readers see the old one or the new one."""
        if change(self._content) == self._content or self.trouble is not None:
            return
        from filelock import FileLock  # late: most commands see nothing new

        with contextlib.suppress(OSError):  # locked for too long, read-only, full
            path = cache_directory() / FILE_NAME
            with FileLock(path.with_suffix(".lock"), _LOCK_SECONDS, fallback_to_soft=False):
                content = change(self._read())
                write_atomic(path, content.to_json(), sync=False)  # it can be rebuilt
            self._content = content


def _is_news(entry: Entry, known: Entry | None) -> bool:
    """Return True for an entry to add: one known from another place is a copy, while the other one exists.

    What is the caller's own is no copy of what somebody else has.
    """
    if known is None or known == entry:
        return known is None
    return known.run_dir == entry.run_dir or not known.is_there or (entry.is_own and not known.is_own)
