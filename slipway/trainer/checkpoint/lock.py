"""One training at a time in a directory of checkpoints. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import IO

from slipway.common.errors import UserError
from slipway.trainer.checkpoint.files import is_absent
from slipway.trainer.logs import LOGGER

LOCK = ".lock"
_NOT_THERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Lock:
    """A directory's lock; it ends with :meth:`release`, or with this process however that ends.

    A POSIX record lock, because a process forked off does not inherit it, and because NFS has it too. Such a
    lock ends when its process closes *any* descriptor of the file: nothing else here opens it.

    Parameters
    ----------
    directory
        Created if need be.
    log_dir
        The training's directory of logs, which :meth:`check` looks for as well.

    Raises
    ------
    UserError
        If another process holds the lock, or nothing can be written in the directory.
    """

    def __init__(self, directory: Path, log_dir: Path | None = None) -> None:
        self._file = _open(directory)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                # POSIX lets a system say either of two numbers.
                taken = error.errno in (errno.EACCES, errno.EAGAIN)
                message = _explain_taken(directory, self._file) if taken else f"{directory}: {error.strerror}"
                self._file.close()
                raise UserError(message) from None
            LOGGER.warning(
                "%s has no file locks (%s): make sure that only one training writes there",
                directory,
                error.strerror,
            )
        # Who holds it, for a person.
        me = {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job": os.environ.get("SLURM_JOB_ID")}
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(me) + "\n")
        self._file.flush()
        # Held open, so that no directory which is made in their places has their numbers.
        self._held = {
            path: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for path in (directory, log_dir)
            if path is not None
        }

    def find_lost(self) -> Path | None:
        """Return a directory that was deleted or moved since, with its run; None if all are still there.

        Raises
        ------
        OSError
            If the lock cannot be examined, as when a file system does not answer.
        """
        return next((path for path, held in self._held.items() if not _is_at(path, held)), None)

    def check(self) -> None:
        """Raise UserError if a directory was lost: the next checkpoint would be another training's."""
        path = self.find_lost()
        if path is not None:
            raise UserError(f"{path} was deleted or moved under this training, which saves nothing and ends")

    def release(self) -> None:
        """Let others have the directory."""
        self._file.close()
        for held in self._held.values():
            os.close(held)


def _open(directory: Path) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"exp_manager.checkpoint_callback_params.dirpath={directory}: {error.strerror}; "
            "exp_manager.create_checkpoint_callback=False trains without checkpoints"
        ) from None


def _is_at(path: Path, held: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(held))
    except OSError as error:
        # Of a directory that another node deleted, NFS says that the handle is stale.
        if is_absent(error) or error.errno == errno.ESTALE:
            return False
        raise


def _explain_taken(directory: Path, file: IO[str]) -> str:
    return (
        f"another training writes its checkpoints into {directory}: {_read_holder(file)}. Wait until it has "
        "ended (training.run.dependency=singleton has the scheduler wait), train under another "
        "training.run.name, or write none: exp_manager.create_checkpoint_callback=False"
    )


def _read_holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        holder = json.loads(file.read())
        job = f", Slurm job {holder['slurm_job']}" if holder["slurm_job"] else ""
        return f"process {holder['pid']} on {holder['host']}{job}"
    except (OSError, ValueError, KeyError, TypeError):
        return "an unknown process"
