"""The runs that this user has seen: a cache for quick look-ups, rebuilt from manifests at any time.

It knows directories with runs (trees), and launches by their tags. It is never the truth: each result is
compared with the manifest. Nothing that happens to the cache is an error: it may be deleted, broken, of
another version, or on a full disk. It lies on this machine's own disk, in a directory that nobody else can
write: ``$SLIPWAY_CACHE_DIR``, else ``/var/tmp/slipway-<uid>``. The home is often on the network, where a
database's locks are slow or do not work.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.runs.manifest import Manifest, find_manifest
from launcher.runs.paths import LAUNCHES, MANIFEST
from launcher.runs.trust import is_own, usable_slurm_conf

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
FILE_NAME = "runs-1.sqlite3"

# Text as bytes: a path need not be UTF-8.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS trees (path BLOB PRIMARY KEY);
CREATE TABLE IF NOT EXISTS launches (
    tag BLOB PRIMARY KEY, run BLOB, run_dir BLOB, number INTEGER, job_id BLOB,
    scheduler BLOB, slurm_conf BLOB, user BLOB, created BLOB
);
CREATE TABLE IF NOT EXISTS silent (slurm_conf BLOB PRIMARY KEY, since REAL);
CREATE INDEX IF NOT EXISTS by_job ON launches (job_id);
CREATE INDEX IF NOT EXISTS by_run ON launches (run);
CREATE INDEX IF NOT EXISTS by_dir ON launches (run_dir);
"""

_LOCK_SECONDS = 5.0  # for which another process may keep it locked
# SQLite's codes of an unusable file: an error in the statement (another schema), a wrong type, a broken file,
# no database.
_BROKEN = (1, 20, 11, 26)
_BUSY = 5
_AT_ONCE = 500  # rows in one question; SQLite takes at least 999 parameters


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


_COLUMNS = tuple(field.name for field in fields(Entry))


def entry_of(run_dir: Path, number: int, manifest: Manifest, job_id: str | None) -> Entry:
    """Return the entry of a launch at its present place."""
    slurm_conf = usable_slurm_conf(run_dir / LAUNCHES / str(number) / MANIFEST, manifest.slurm_conf)
    own: dict[str, Any] = {"run_dir": run_dir, "number": number, "job_id": job_id, "slurm_conf": slurm_conf}
    return Entry(**own, **{name: getattr(manifest, name) for name in _COLUMNS if name not in own})


# The text of a statement of SQL, and the rows of values to execute it with.
Statement = tuple[str, Sequence[Sequence[Any]]]


class Index:
    """The cache of this user. No method raises: unreadable data are empty, unwritable data are lost.

    `trouble` says why the cache is not used, if the user should know.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None
        # A lock is waited for once, and not by each question.
        self._is_locked = False

    def trees(self) -> list[Path]:
        """Return the directories in which runs were seen, in no order."""
        return [Path(os.fsdecode(row[0])) for row in self._ask("SELECT path FROM trees ORDER BY path")]

    def entries(self) -> list[Entry]:
        """Return all launches, the oldest first."""
        return self._entries("TRUE ORDER BY created, tag")

    def with_job(self, job_id: str) -> list[Entry]:
        """Return the launches that had a job of this id, or are points of such an array: ids are reused."""
        # The bytes after all that begin with the id and "_" begin with the id and "`".
        condition = "job_id = ? OR (job_id > ? AND job_id < ?) ORDER BY created"
        return self._entries(condition, (job_id, f"{job_id}_", f"{job_id}`"))

    def with_name(self, run: str) -> list[Entry]:
        """Return the launches of all runs of a name."""
        return self._entries("run = ? ORDER BY created", (run,))

    def with_tags(self, tags: Sequence[str]) -> dict[str, Entry]:
        """Return the launches of these tags, by tag."""
        entries: list[Entry] = []
        for start in range(0, len(tags), _AT_ONCE):
            some = tags[start : start + _AT_ONCE]
            entries += self._entries(f"tag IN ({', '.join('?' * len(some))})", some)
        return {entry.tag: entry for entry in entries}

    def silent_since(self, moment: float) -> dict[str, float]:
        """Return when clusters did not answer, by their configurations, since a moment."""
        question = f"SELECT slurm_conf, since FROM silent WHERE since > {float(moment)!r}"
        return {os.fsdecode(row[0]): float(row[1]) for row in self._ask(question)}

    def note_silence(self, slurm_conf: str, moment: float | None) -> None:
        """Remember when a cluster did not answer; ``None`` means that it did."""
        blob = _blob(slurm_conf)
        rows = [] if moment is None else [(blob, moment)]
        self._execute(
            ("DELETE FROM silent WHERE slurm_conf = ?", [(blob,)]), ("INSERT INTO silent VALUES (?, ?)", rows)
        )

    def remember(self, entries: Iterable[Entry], trees: Iterable[Path] = ()) -> None:
        """Add launches that were seen just now, and the directories of their runs."""
        seen = {entry.tag: entry for entry in sorted(entries, key=lambda entry: entry.is_own)}
        known = self.with_tags(list(seen))
        changed = [entry for tag, entry in seen.items() if _is_news(entry, known.get(tag))]
        paths = {*trees, *(entry.run_dir.parent for entry in changed)}.difference(self.trees())
        marks = ", ".join("?" * len(_COLUMNS))
        self._execute(
            (f"INSERT OR REPLACE INTO launches VALUES ({marks})", list(map(_row, changed))),
            ("INSERT OR IGNORE INTO trees VALUES (?)", [(_blob(path),) for path in paths]),
        )

    def forget(self, run_dirs: Iterable[Path] = (), trees: Iterable[Path] = ()) -> None:
        """Drop runs and trees that are gone."""
        self._execute(
            ("DELETE FROM launches WHERE run_dir = ?", [(_blob(path),) for path in run_dirs]),
            ("DELETE FROM trees WHERE path = ?", [(_blob(path),) for path in trees]),
        )

    def _entries(self, condition: str, values: Sequence[str] = ()) -> list[Entry]:
        blobs = [_blob(value) for value in values]
        rows = self._ask(f"SELECT {', '.join(_COLUMNS)} FROM launches WHERE {condition}", blobs)
        return [_entry(row) for row in rows]

    def _ask(self, question: str, values: Sequence[bytes | None] = ()) -> list[tuple[Any, ...]]:
        return self._execute((question, [values]))

    def _execute(self, *statements: Statement) -> list[tuple[Any, ...]]:
        """Execute each statement with each of its rows, in one transaction; replace a broken file."""
        if self.trouble is not None or self._is_locked or not any(rows for _, rows in statements):
            return []
        try:
            path = cache_directory() / FILE_NAME
        except NotTrusted as error:
            self.trouble = str(error)
            return []
        except OSError:
            return []
        import sqlite3

        for _ in range(2):
            try:
                return _in_transaction(path, statements)
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", None)
                if code not in _BROKEN:  # locked for too long, read-only, full
                    self._is_locked = code == _BUSY
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
            except (OSError, OverflowError):
                break
        return []


def _in_transaction(path: Path, statements: Sequence[Statement]) -> list[tuple[Any, ...]]:
    import sqlite3

    with contextlib.closing(sqlite3.connect(os.fspath(path), timeout=_LOCK_SECONDS)) as connection:
        # The data can be rebuilt: no waiting for the disk.
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(_SCHEMA)
        with connection:
            runs = [(text, values) for text, rows in statements for values in rows]
            return [answer for text, values in runs for answer in connection.execute(text, values)]


def _is_news(entry: Entry, known: Entry | None) -> bool:
    """Return True for an entry to add: one known from another place is a copy, while the other one exists.

    What is the caller's own is no copy of what somebody else has.
    """
    if known is None or known == entry:
        return known is None
    return known.run_dir == entry.run_dir or not known.is_there or (entry.is_own and not known.is_own)


def _row(entry: Entry) -> list[bytes | int | None]:
    values = (getattr(entry, name) for name in _COLUMNS)
    return [value if isinstance(value, int) else _blob(value) for value in values]


def _entry(row: Sequence[Any]) -> Entry:
    texts = [os.fsdecode(value) if isinstance(value, bytes) else value for value in row]
    values: dict[str, Any] = dict(zip(_COLUMNS, texts, strict=True))
    return Entry(**values | {"run_dir": Path(values["run_dir"]), "number": int(values["number"])})


def _blob(value: str | Path | None) -> bytes | None:
    if value is None:
        return None
    try:
        return os.fsencode(value)
    except UnicodeEncodeError:  # a manifest may hold anything, and question marks make as good a key
        return str(value).encode("utf-8", "replace")
