"""Downloads that resume, are verified, and appear under their names only when they are complete.

A download has three files: ``NAME``, complete and verified; ``NAME.part``, which was received so far; and
``NAME.state`` with the version that the server named, how much of the part is on the disk, and the SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from slipway.common.backoff import double_wait
from slipway.common.errors import UserError
from slipway.common.files import sha256_of, sync_path, write_atomic
from slipway.corpus.errors import OutsideError
from slipway.corpus.progress import Progress
from slipway.corpus.remotes import Body, ChangedError, Remote, TransientError, Version

_READ_BYTES = 1 << 18
_ERRORS = 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SLOW = "hardly a byte comes within data_preparation.download_timeout"


@dataclass(frozen=True)
class Policy:
    """Attempts, waits in seconds, and sizes in bytes of downloads.

    Attributes
    ----------
    attempts
        Failures in a row, without a new byte between them, after which a download ends.
    first_wait, longest_wait
        Before the second attempt, and the limit to which it doubles.
    timeout
        To wait for a connection, for all headers, for each read, and for the next `slowest` bytes.
    parallel
        Downloads at once.
    sync_bytes
        Received between two writes of the state: no more is received again after a crash of the machine.
    """

    attempts: int = 8
    first_wait: float = 1.0
    longest_wait: float = 60.0
    timeout: float = 60.0
    slowest: int = 4096
    parallel: int = 4
    sync_bytes: int = 16 << 20


@dataclass(frozen=True)
class Download:
    """A file on a server, and the SHA-256 that it must have."""

    remote: Remote
    sha256: str | None = None


@dataclass(frozen=True)
class Fetched:
    """A complete local file."""

    path: Path
    size: int
    sha256: str


def file_name(remote: Remote) -> str:
    """Return the local name of a download: unique to its address, and without a separator or leading dot."""
    key = hashlib.sha256(remote.name.encode()).hexdigest()[:10]
    return f"{key}-{re.sub(r'[^A-Za-z0-9._+-]', '_', remote.file_name)[-120:]}"


def fetch_all(
    downloads: Sequence[Download],
    directory: Path,
    progress: Progress,
    policy: Policy | None = None,
    timeout: float = 60.0,
) -> list[Fetched]:
    """Fetch several files at once.

    A mistake in one does not keep the others from being tried, so that all mistakes are named together. After
    a failure of the network or the disk, no further file is begun.

    Parameters
    ----------
    downloads
        Each address once.
    directory
        Made if it does not exist. Complete files there are verified and used again.
    progress
        Takes received bytes, and lines to say.
    policy, timeout
        How it is tried; without a policy the default with this timeout.

    Raises
    ------
    UserError
        If an address, a checksum or a permission is wrong.
    OutsideError
        If the network or the disk failed.
    """
    policy = policy or Policy(timeout=timeout)
    directory.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    has_failed = threading.Event()

    def attempt(download: Download) -> Fetched | Exception | None:
        if has_failed.is_set():
            return None
        try:
            return _Transfer(download, directory, policy, progress, stop).run()
        except UserError as error:
            return error
        except OutsideError as error:
            has_failed.set()
            return error

    with ThreadPoolExecutor(policy.parallel) as pool:
        try:
            results = list(pool.map(attempt, downloads))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    errors = [result for result in results if isinstance(result, Exception)]
    if errors:
        lines = [str(error) for error in errors[:_ERRORS]]
        if len(errors) > _ERRORS:
            lines.append(f"... and {len(errors) - _ERRORS:,} more files")
        if None in results:
            lines.append(f"{results.count(None):,} further files were not begun")
        is_mistake = any(isinstance(error, UserError) for error in errors)
        raise (UserError if is_mistake else OutsideError)("\n".join(lines))
    return [result for result in results if isinstance(result, Fetched)]


@dataclass(frozen=True)
class _State:
    """Version and synced bytes of a download, kept between two runs."""

    version: Version
    synced: int = 0
    sha256: str | None = None

    def write(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> _State | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(Version(**content["version"]), int(content["synced"]), content["sha256"])
        except (OSError, ValueError, TypeError, KeyError):
            return None


class _Transfer:
    """One download, from its state on the disk to the complete file."""

    def __init__(
        self, download: Download, directory: Path, policy: Policy, progress: Progress, stop: threading.Event
    ) -> None:
        self.remote, self.expected = download.remote, download.sha256
        self.policy, self.progress, self.stop = policy, progress, stop
        self.path = directory / file_name(download.remote)
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.state_path = self.path.with_name(f"{self.path.name}.state")
        self.state: _State | None = None
        self.received = 0
        self.digest = hashlib.sha256()
        self.resumed = False

    def run(self) -> Fetched:
        try:
            with self._lock():
                self.state = _State.read(self.state_path)
                known = self._find_complete()
                if known is not None and known.sha256 == self.expected:
                    return self._reuse(known)
                return self._attempts(known)
        except OSError as error:
            if error.errno in _FULL:
                raise OutsideError(self._explain_full_disk()) from None
            raise OutsideError(f"{self.part}: {error.strerror or error}") from None

    def _say(self, line: str) -> None:
        self.progress.say(f"{self.remote.name}: {line}")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the part against other processes; a lock ends with its process."""
        with self.part.open("ab") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.remote.name}: another process is fetching it into {self.part}; wait for that one"
                ) from None
            # A killed process may have left one.
            for unfinished in self.path.parent.glob(f".{glob.escape(self.state_path.name)}.*"):
                unfinished.unlink()
            try:
                yield
            finally:
                if self.part.is_file() and not self.part.stat().st_size:
                    self.part.unlink()

    def _find_complete(self) -> Fetched | None:
        """Return the file of an earlier run if it is unchanged."""
        if self.state is None or self.state.sha256 is None or not self.path.is_file():
            return None
        known = Fetched(self.path, self.path.stat().st_size, sha256_of(self.path))
        if known.sha256 == self.state.sha256:
            return known
        self._say(f"{self.path} changed since it was fetched: fetched again")
        self.state = None
        return None

    def _reuse(self, known: Fetched) -> Fetched:
        self.progress.expect(self.path.name, known.size)
        self.progress.advance(known.size, items=1, old=True)
        return known

    def _attempts(self, known: Fetched | None) -> Fetched:
        """Request until the file is complete, or nothing more comes.

        Parameters
        ----------
        known
            The complete file of an earlier run.
        """
        failures, furthest = 0, 0
        while True:
            try:
                body = self._open_changed(known) if known is not None else self._request()
                if body is None:
                    assert known is not None
                    return self._reuse(known)
                known = None
                self._receive(body)
                return self._finish()
            except TransientError as error:
                reason, wait = str(error), error.wait
            except ChangedError as error:
                reason, wait = str(error), None
                self._begin_again()
            if self.received > furthest and reason != _SLOW:
                failures, furthest = 0, self.received
            failures += 1
            if failures >= self.policy.attempts:
                raise OutsideError(
                    f"{self.remote.name}: {reason}; gave up after {failures} attempts without a new byte. "
                    f"{self.received:,} bytes are kept in {self.part}: run it again to go on from there"
                )
            self._wait(failures, reason, wait)

    def _wait(self, failures: int, reason: str, wait: float | None) -> None:
        longest = double_wait(failures - 1, self.policy.first_wait, self.policy.longest_wait)
        # Jitter: clients that failed together do not come back together.
        seconds = max(random.uniform(longest / 2, longest), wait or 0.0)
        self._say(
            f"{reason}; {self.received:,} bytes so far; attempt {failures + 1} of {self.policy.attempts} in "
            f"{seconds:.0f} s"
        )
        if self.stop.wait(seconds):
            raise OutsideError(f"{self.remote.name}: interrupted")

    def _open_changed(self, known: Fetched) -> Body | None:
        """Return the body of another version than the complete file; None if the server has no other."""
        assert self.state is not None
        try:
            body = self.remote.open(0, self.state.version, self.policy.timeout)
        except (UserError, TransientError) as error:
            if self.expected is not None:
                raise
            self._say(f"{error}: the copy of an earlier run is used, and may be older than the server's")
            return None
        change = self.state.version.differs(body.version) if body is not None else None
        if change is not None:
            self._say(f"changed on the server since it was fetched ({change}): fetched anew")
        elif self.expected is not None and body is None:
            raise UserError(self._wrong(known.sha256))
        elif self.expected is None and body is not None:
            body.close()
            return None
        return body

    def _request(self) -> Body:
        """Open the file at the first byte that is missing."""
        start = self._resume_at()
        known = self.state.version if self.state and start else None
        if known is None:
            body = self.remote.open(0, None, self.policy.timeout)
            assert body is not None  # without a known version, nothing is unchanged
            return body
        if start == known.size:
            return Body(known, start, lambda size: b"", lambda: None)
        body = self.remote.open(start, known, self.policy.timeout)
        assert body is not None
        change = known.differs(body.version)
        if change is not None:
            self._say(
                f"changed on the server ({change}): the {start:,} bytes of the former version are dropped"
            )
        elif body.start == 0:
            self._say("the server sends no ranges: begun again")
        if body.start not in (0, start) or (change is not None and body.start):
            body.close()
            raise ChangedError(change or f"byte {start:,} was requested, and byte {body.start:,} came")
        if body.start:
            # A partial response need not repeat the client's version.
            version = Version(
                body.version.size or known.size,
                body.version.etag or known.etag,
                body.version.modified or known.modified,
            )
            body.version = version
        return body

    def _resume_at(self) -> int:
        """Return how many bytes of the part are good: on the disk, and of a version that can be named."""
        if self.state is None or not self.part.is_file():
            return 0
        if self.state.version.validator() is None and self.expected is None:
            return 0
        return min(self.part.stat().st_size, self.state.synced)

    def _receive(self, body: Body) -> None:
        """Append the body to the part, from where it starts."""
        total = body.version.size
        with contextlib.closing(body), self.part.open("r+b", buffering=0) as part:
            self._align(part, body)
            self._need_space(total)
            began, before = time.monotonic(), self.received
            try:
                while chunk := body.read(_READ_BYTES):
                    view = memoryview(chunk)
                    while view:
                        view = view[part.write(view) :]
                    self.digest.update(chunk)
                    self.received += len(chunk)
                    self.progress.advance(len(chunk))
                    if time.monotonic() - began > self.policy.timeout:
                        if self.received - before < self.policy.slowest:
                            raise TransientError(_SLOW)
                        began, before = time.monotonic(), self.received
                    if self.stop.is_set():
                        raise OutsideError(f"{self.remote.name}: interrupted")
                    if self.state is None or self.received - self.state.synced >= self.policy.sync_bytes:
                        self._sync(part, body.version)
            finally:
                self._sync(part, body.version)
        if total is not None and self.received < total:
            raise TransientError(f"the connection ended before byte {total:,}")
        if total is not None and self.received > total:
            raise ChangedError(f"the server sent more than the {total:,} bytes that it announced")
        if total is None and self.expected is None:
            self._say(
                "the server names no length; only a sha256 in `inputs` would show that the file is truncated"
            )

    def _align(self, part: FileIO, body: Body) -> None:
        """Hash the bytes that are kept, and cut the part behind them."""
        if body.start != self.received:
            self._begin_again()
            while self.received < body.start:
                chunk = part.read(min(_READ_BYTES, body.start - self.received))
                if not chunk:
                    raise ChangedError(f"{self.part} is shorter than it was")
                self.digest.update(chunk)
                self.received += len(chunk)
            self.progress.advance(self.received, old=True)
        self.resumed = body.start > 0
        part.truncate(body.start)
        part.seek(body.start)
        if body.version.size is not None:
            self.progress.expect(self.path.name, body.version.size)

    def _sync(self, part: FileIO, version: Version) -> None:
        os.fsync(part.fileno())
        self.state = _State(version, self.received)
        self.state.write(self.state_path)

    def _begin_again(self) -> None:
        self.progress.advance(-self.received)
        self.received, self.digest, self.state = 0, hashlib.sha256(), None

    def _finish(self) -> Fetched:
        sha256 = self.digest.hexdigest()
        if self.expected is not None and sha256 != self.expected:
            resumed = self.resumed
            self._begin_again()
            self.state_path.unlink()
            if resumed:
                raise ChangedError(f"its sha256 is {sha256} after it was received in several parts")
            self.part.unlink()
            raise UserError(f"{self._wrong(sha256)}; the download was discarded")
        assert self.state is not None
        _State(self.state.version, self.received, sha256).write(self.state_path)
        self.part.replace(self.path)
        sync_path(self.path.parent)
        self.progress.advance(0, items=1)
        return Fetched(self.path, self.received, sha256)

    def _wrong(self, sha256: str) -> str:
        return (
            f"{self.remote.name}: its sha256 is {sha256}, expected {self.expected}: the server has another "
            "file than the configuration names"
        )

    def _need_space(self, total: int | None) -> None:
        missing = (total or 0) - self.received
        if missing > shutil.disk_usage(self.part.parent).free:
            raise OutsideError(self._explain_full_disk(missing))

    def _explain_full_disk(self, missing: int | None = None) -> str:
        free = shutil.disk_usage(self.part.parent).free
        needs = "" if missing is None else f"{missing:,} bytes are still to come, "
        return (
            f"{self.remote.name}: the disk of {self.part.parent} is full: {needs}{free:,} bytes are free. "
            "Received bytes are kept: make space and run it again, or set data_preparation.work_dir to a "
            "directory on a larger disk"
        )
