"""Files and directories of a job, looked for on this machine by reading alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from launcher.checks.gathering.checkpoints import lost_checkpoint
from launcher.checks.gathering.data_sets import lost_data
from launcher.checks.gathering.images import fetched_at_once, lost_image
from launcher.checks.gathering.mounts import lost_mounts
from launcher.checks.gathering.path_resolver import Ground
from launcher.checks.gathering.scripts import lost_script
from launcher.checks.gathering.sharing import local_paths, results_value
from launcher.checks.gathering.tokenizers import lost_tokenizer
from launcher.checks.path_facts import Lack, PathFacts
from launcher.drafting import Draft, results_key
from launcher.errors import explain_os_error
from launcher.file_systems import existing, room_at


def path_facts(made: Draft) -> PathFacts:
    """Find out what this machine has of a job's files and directories."""
    ground = Ground(made)
    local, checkpoints = local_paths(ground), _checkpoints(ground)
    room = room_at(checkpoints)
    missing = {}
    if local is None:
        missing["local"] = "this machine does not tell what its file systems are"
    if room is None:
        missing["free_bytes"] = "the file system of the results does not tell how much room it has"
    return PathFacts(
        tokenizer=lost_tokenizer(ground),
        data=lost_data(ground),
        checkpoint=lost_checkpoint(ground),
        image=lost_image(ground),
        fetched=fetched_at_once(ground),
        script=lost_script(ground),
        mounts=lost_mounts(ground),
        results=_not_writable(made),
        local=local,
        free_bytes=room.free_bytes if room is not None else None,
        free_by=room.by if room is not None else "file system",
        checkpoints_there=_entries(checkpoints),
        missing=missing,
    )


def _checkpoints(ground: Ground) -> Path:
    given = ground.plan.job.chain.checkpoints
    found = ground.host(given) if given is not None else None
    return found if found is not None else ground.plan.paths.checkpoints


def _entries(directory: Path) -> int | None:
    try:
        # Neither the link to the newest, nor the damaged ones that our trainer set aside.
        beside = ("latest", "damaged")
        names = (entry.name for entry in directory.iterdir())
        return sum(not name.startswith(".") and name not in beside for name in names)
    except FileNotFoundError:
        return 0
    except OSError:
        return None


def _not_writable(made: Draft) -> tuple[Lack, ...]:
    """The launcher itself writes the directory of the run, so that this machine can tell."""
    run_dir, key = made.plan.paths.run_dir, results_key(made)
    code = _refusal(existing(run_dir))
    if code is None:
        return ()
    told = explain_os_error(OSError(code, os.strerror(code)), run_dir, key)
    return (Lack(key, results_value(made), told.message, True, told.hint),)


def _refusal(place: Path) -> int | None:
    """The number of the error that writing there would have."""
    if not place.is_dir():
        return errno.ENOTDIR
    try:
        found = os.statvfs(place)
    except OSError as error:
        return error.errno
    if found.f_flag & os.ST_RDONLY:
        return errno.EROFS
    if not os.access(place, os.W_OK | os.X_OK):
        return errno.EACCES
    # Some file systems count no files, and some in user space no blocks either.
    if (found.f_blocks and not found.f_bavail) or (found.f_files and not found.f_favail):
        return errno.ENOSPC
    return None
