"""Reports of failed ranks: the first one and its cause. Imports no torch.

A rank that fails leaves ``failures/globalrank-<rank>.json`` in the directory of logs before it leaves, and so
before the others can notice. Those lose their connection to it, look for its file, and quote it in one line:
their own tracebacks would bury the one that shows the cause. A killed rank leaves no file; another of its
node finds its process gone, and writes that down for it.

It is a file for each rank, because appending to one file from several nodes is not atomic on NFS.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from slipway.common.files import write_atomic
from slipway.trainer.world import World

DIRECTORY = "failures"
# What gloo, NCCL and torch's store say when the process at the other end is no more.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process exited"
    r"|socket (error|closed)|communicator was aborted|connectFullMesh failed|recvValue failed|failed to recv"
    r"|ncclRemoteError",
    re.IGNORECASE,
)
# For a file to become visible on another node, and for a killed process to be quite gone.
PATIENCE_SECONDS = 3.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, `time` in Unix seconds; `log` is the file that has its traceback, if any."""

    time: float
    rank: int
    host: str
    error: str
    log: str | None = None

    def write(self, log_dir: Path) -> None:
        """Leave this for the other ranks and for who reads the logs."""
        path = log_dir / DIRECTORY / _file_name(self.rank)
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(asdict(self)) + "\n", sync=False)


@dataclass(frozen=True)
class Peers:
    """Host and process id of each rank."""

    addresses: tuple[tuple[str, int], ...] = ()

    @classmethod
    def introduce(cls) -> Peers:
        """Exchange hosts and process ids with the other ranks; every rank calls this."""
        import torch.distributed as dist

        addresses: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(addresses, (socket.gethostname(), os.getpid()))
        return cls(tuple(addresses))

    def find_gone(self) -> list[int]:
        """Return the ranks of this host whose processes are no more."""
        this_host = socket.gethostname()
        return [
            rank for rank, (host, pid) in enumerate(self.addresses) if host == this_host and not _lives(pid)
        ]


def forget(log_dir: Path, rank: int) -> None:
    """Remove this rank's record of a failure in an earlier training with the same directory of logs."""
    (log_dir / DIRECTORY / _file_name(rank)).unlink(missing_ok=True)


def make(world: World, error: BaseException, log: str) -> Failure:
    """Return what an exception of this rank comes to, its message cut to its first line."""
    return Failure(time.time(), world.rank, socket.gethostname(), _first_line(error), log)


def find_first(log_dir: Path, ranks: int) -> Failure | None:
    """Return the failure that came first, of those that the ranks left."""
    records = [_read(path) for path in (log_dir / DIRECTORY).glob("globalrank-*.json")]
    failures = [failure for failure in records if failure and failure.rank < ranks]
    return min(failures, key=lambda failure: (failure.time, failure.rank), default=None)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exception only says that another rank is no more."""
    seen: BaseException | None = error
    while seen is not None:
        # All of torch's are RuntimeErrors; a BrokenPipeError of ours, say of a closed terminal, is not.
        if isinstance(seen, RuntimeError) and _LOST.search(str(seen)):
            return True
        seen = seen.__cause__
    return False


def find_cause(log_dir: Path, world: World, peers: Peers) -> Failure | None:
    """Look for what another rank failed of; one that is gone without a word is written down here.

    Returns
    -------
    Failure or None
        None without a record within :data:`PATIENCE_SECONDS`, as when a whole node is lost.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        # First the lost processes, then the records: a rank leaves its record before it goes.
        gone = peers.find_gone()
        cause = find_first(log_dir, world.size)
        if cause is not None:
            return cause
        if gone:
            return _record_vanished(log_dir, gone[0])
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)


def describe(cause: Failure | None, error: BaseException) -> str:
    """Describe in one line the loss of another rank, which this rank failed of."""
    if cause is None:
        return (
            "another rank was lost, and no rank reported why: its process may have been killed, or its node "
            f"have died ({_first_line(error)})"
        )
    where = f"; its error is in {cause.log}" if cause.log else ""
    return f"rank {cause.rank} on {cause.host} was lost: {cause.error}{where}"


def _first_line(error: BaseException) -> str:
    kind, text = type(error).__name__, str(error).strip()
    return f"{kind}: {text.splitlines()[0]}" if text else kind


def _record_vanished(log_dir: Path, rank: int) -> Failure:
    killed = "its process is gone without a word: killed by a signal, or for want of memory"
    failure = Failure(time.time(), rank, socket.gethostname(), killed)
    failure.write(log_dir)
    return failure


def _file_name(rank: int) -> str:
    return f"globalrank-{rank}.json"


def _read(path: Path) -> Failure | None:
    try:
        return Failure(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _lives(pid: int) -> bool:
    try:
        # The state follows the name, which may hold anything: proc(5).
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    except OSError:
        return False
    return state.split()[:1] not in (["Z"], ["X"])
