"""The image file of a job: its record, its digest, the copies on the nodes, the name of its container."""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
from typing import Any, Dict, Sequence

from slipway.common.files import sha256_of
from slipway.common.node.marks import image_digest, leave_image_digest
from slipway.common.node.settings import ContainerSettings
from slipway.supervisor.job import Job
from slipway.supervisor.tasks import Signals, leave_to_end, run_before

_DIGITS = 12
_RECORD_BYTES = 1 << 20


def record_digest(job: Job, container: ContainerSettings, signals: Signals) -> None:
    """Leave the digest of the image as it runs, by a process at the lowest priority; nothing waits for it."""
    if not os.path.isfile(container.image) or image_digest(job.directory):
        return
    child = os.fork()
    if child:
        leave_to_end(child)
        return
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the tasks' alone
        signals.release()
        os.setpgid(0, 0)
        with open(os.devnull, "r+b") as nothing:
            for descriptor in range(3):
                os.dup2(nothing.fileno(), descriptor)
        digest = read_record(container.image).get("sha256") or _sha256(container.image)
        leave_image_digest(job.directory, digest)
    finally:
        os._exit(0)


def read_record(image: str) -> Dict[str, str]:
    """Return the ``digest`` and ``sha256`` in an image's record, if it is of the present file."""
    try:
        state = os.stat(image)
        with open(image + ".json") as stream:
            record: Any = json.loads(stream.read(_RECORD_BYTES))
        if (record["size"], record["modified"]) != (state.st_size, int(state.st_mtime)):
            return {}
        hashes = {}
        for key in ("digest", "sha256"):
            match = re.match(r"(?:sha256:)?([0-9a-f]{64})\Z", str(record.get(key, "")))
            if match:
                hashes[key] = match.group(1)
        return hashes
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def container_name(container: ContainerSettings) -> str:
    """Return the name of the container that is kept: another image, or state of its file, is another one."""
    record = read_record(container.image)
    digits = record.get("digest") or record.get("sha256")
    if not digits:
        try:
            state = os.stat(container.image)
            # The time of the last change as in ``stat --format=%.9Y``.
            seconds, nanoseconds = divmod(state.st_mtime_ns, 10**9)
            text = f"{container.image}\n{state.st_size} {seconds}.{nanoseconds:09d} {state.st_ino}\n"
        except OSError:
            text = container.image + "\n"
        digits = hashlib.sha256(os.fsencode(text)).hexdigest()
    return f"{container.name}-{digits[:_DIGITS]}"


def stage(job: Job, container: ContainerSettings, on_each_node: Sequence[str], signals: Signals) -> str:
    """Copy the image to each node's own disk, once for all jobs; return the path to start from.

    Raises
    ------
    Signalled
        If the job was signalled meanwhile.
    """
    image = container.image
    copies = f"{container.stage_to}/slipway-{os.getuid()}"
    try:
        status = os.stat(image)
        state = f"{status.st_size} {int(status.st_mtime)}"
        digits = hashlib.sha256(os.fsencode(f"{image} {state}\n")).hexdigest()[:_DIGITS]
        copy = f"{copies}/{os.path.splitext(os.path.basename(image))[0]}-{digits}.sqsh"
        script = job.directory + "/stage_image.sh"
        if run_before([*on_each_node, "bash", script, image, copy, state], signals) == 0:
            return copy
    except OSError as error:
        job.say(str(error))
    job.say(f"not every node has a copy of the image in {copies}: the tasks start from {image}")
    return image


def _sha256(path: str) -> str:
    os.nice(19)
    with contextlib.suppress(OSError):
        subprocess.call(["ionice", "-c", "3", "-p", str(os.getpid())])
    return sha256_of(path)
