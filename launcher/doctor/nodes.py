"""Examine compute nodes by a job of a few seconds, which runs the probe once on each."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.doctor import probe
from launcher.doctor.facts import Machine, machine_of
from launcher.errors import UserError, end_of, escape
from launcher.images.tools import ending_cleanly
from launcher.plan import Plan
from launcher.runs.provenance import new_tag
from launcher.slurm.commands import WITHOUT_SLURM, error_text
from launcher.slurm.queue_flags import CHOOSING_NODES

_MINUTES = 5
_MEMORY = "500M"  # the default may be the whole memory of a node
_ENDING_SECONDS = 15.0

# Any Python will do: the launcher's own, where it is shared, or the system's. `$2` is the probe.
_START = """\
for python in "$1" python3 /usr/bin/python3 /usr/libexec/platform-python; do
    if "$python" -I -c 'import json, pathlib, zlib' 2>/dev/null; then
        exec "$python" -I -c "$2" "$3"
    fi
done
echo "$4 ${SLURMD_NODENAME:-$(uname -n)} 0 0 -"
"""
# The program that a started image runs: `$1` is in front of the node's name.
_STARTED = 'echo "$1 ${SLURMD_NODENAME:-$(uname -n)}"'
# The message in `slurmstepd-n1: error: pyxis:     [ERROR] No such file or directory: /x.sqsh`.
_PYXIS_SAYS = re.compile(r"pyxis: +(?:\[\w+\] +)?(.*)")
_PYXIS_CHILD = re.compile(r"(?:child \d+|container start) failed with error code: \d+")
_PYXIS_SAYS_NOTHING = (
    "container was not started successfully by another task",
    "printing enroot log file:",
    "if the image has an unusual entrypoint, try using --no-container-entrypoint",
)


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of nodes.

    `unprobed` names nodes without any Python to run the probe; `started` those on which the image started,
    None if that was not tried.
    """

    requested: int
    machines: tuple[Machine, ...] = ()
    unprobed: tuple[str, ...] = ()
    why: str | None = None
    started: tuple[str, ...] | None = None
    why_not_started: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes that were examined."""
        return tuple(sorted((*(machine.host for machine in self.machines), *self.unprobed), key=_sort_key))

    @property
    def silent(self) -> int:
        """The number of nodes without an answer."""
        return self.requested - len(self.machines) - len(self.unprobed)


def look(
    plan: Plan, count: int, request: Mapping[str, Any], environment: Mapping[str, str], patience: float
) -> Answers:
    """Run the probe once on each of some nodes of a launch; raise UserError without a Slurm.

    `patience` are the seconds to wait for nodes and their answers.
    """
    if plan.scheduler == "local":
        text = f"--nodes {count}: cluster.scheduler=local has no other machines"
        raise UserError(text, key="cluster.scheduler", hint="without --nodes this machine is examined")
    source = Path(probe.__file__).read_text(encoding="utf-8")
    command = ["sh", "-c", _START, "sh", sys.executable, source, json.dumps(request), probe.MARK]
    out, why = _run(plan, count, command, environment, patience)
    contents, unprobed = read(out.splitlines())
    machines = []
    for content in contents:
        try:
            machines.append(machine_of(content))
        except ValueError:
            why = why or f"{content.get('host')}: its answer cannot be read"
    machines.sort(key=lambda machine: _sort_key(machine.host))
    return Answers(count, tuple(machines), tuple(sorted(unprobed, key=_sort_key)), why)


def start(
    plan: Plan, image: str, nodes: int | Sequence[str], environment: Mapping[str, str], patience: float
) -> tuple[tuple[str, ...], str | None]:
    """Start an image through Pyxis, once on each of some nodes, which are named or counted.

    Return the nodes on which it started, and the reason why it did not on others.
    """
    command = [f"--container-image={image}", *plan.job.srun_args, "sh", "-c", _STARTED, "sh", probe.MARK]
    # A large image takes long: the user raises the patience.
    minutes = max(_MINUTES, math.ceil(patience / 60))
    out, why = _run(plan, nodes, command, environment, patience, minutes=minutes, explain=pyxis_words)
    lines = [line.split(" ") for line in out.splitlines()]
    names = {line[1] for line in lines if len(line) == 2 and line[0] == probe.MARK}
    return tuple(sorted(names, key=_sort_key)), why


def pyxis_words(stderr: str) -> str:
    """Return the errors of Pyxis and Enroot, once for all nodes; all of stderr without such errors."""
    lines = [match[1].strip() for line in stderr.splitlines() if (match := _PYXIS_SAYS.search(line))]
    errors = [line for line in dict.fromkeys(lines) if line and not line.endswith(_PYXIS_SAYS_NOTHING)]
    return "; ".join(line for line in errors if not _PYXIS_CHILD.fullmatch(line)) or error_text(stderr)


def _run(
    plan: Plan,
    nodes: int | Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    patience: float,
    *,
    minutes: int = _MINUTES,
    explain: Callable[[str], str] = error_text,
) -> tuple[str, str | None]:
    """Run a command once on each of some nodes; return its output, and the error if it fails."""
    name = f"slipway-doctor-{new_tag()}"
    count = nodes if isinstance(nodes, int) else len(nodes)
    step = [*srun_command(plan, nodes, name, minutes), *command]
    # A closed terminal, or a signal, leaves no job in the queue either.
    with ending_cleanly(), _start_step(step, environment, count) as process:
        try:
            out, err = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            out, err = _end(process, name, environment)
            why = f"no answer within {patience:g} s; longer: --patience {2 * patience:g}"
            message = _keep_earlier_messages(err)
            return out, f"{why} ({message})" if message else why
        except BaseException:
            _end(process, name, environment)
            raise
    return out, end_of(escape(explain(err))) if process.returncode else None


def _start_step(command: Sequence[str], environment: Mapping[str, str], count: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            # Ctrl-C is ours: srun takes the first one as a question about its state.
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"--nodes {count}: srun: {error.strerror}", hint=WITHOUT_SLURM) from error


def srun_command(plan: Plan, nodes: int | Sequence[str], name: str, minutes: int = _MINUTES) -> list[str]:
    """Return the srun command without its program, one task on each node; in an allocation it is a step."""
    count = nodes if isinstance(nodes, int) else len(nodes)
    chosen = None if isinstance(nodes, int) else ",".join(nodes)
    command = ["srun", f"--job-name={name}", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
    command += ["--cpus-per-task=1", f"--mem={_MEMORY}", f"--time={minutes}", "--chdir=/", "--mpi=none"]
    if plan.scheduler == "allocation":
        # Other steps may run, such as the user's shell; srun does not combine this with --exclusive.
        return [*command, "--overlap", *([f"--nodelist={chosen}"] if chosen else [])]
    # So that the launch's own nodes are examined.
    values = {flag: getattr(plan.job.queue, flag) for flag in CHOOSING_NODES}
    values["nodelist"] = chosen or values["nodelist"]
    command += [f"--{flag}={value}" for flag, value in values.items() if value is not None]
    resources = plan.job.resources
    if resources.gpus_per_node or resources.gpus_per_task or (resources.gres or "").startswith("gpu"):
        # Without this request the job may not see the GPUs.
        command.append("--gres=gpu:1")
    return command


def _end(process: subprocess.Popen[str], name: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """End a step and its job, also one that is still pending."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            ["scancel", f"--name={name}", f"--user={os.getuid()}"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ENDING_SECONDS,
        )
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _keep_earlier_messages(stderr: str) -> str:
    """Return the messages of srun from before we ended it."""
    of_end = ("cancelled", "revoked", "unable to allocate", "terminated", "aborted")
    lines = [line for line in stderr.splitlines() if not any(word in line.lower() for word in of_end)]
    return end_of(escape(error_text("\n".join(lines)))) if lines else ""


def _sort_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts ``n2`` before ``n10``."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def read(lines: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the reports in the lines of all tasks, and the names of nodes without a Python."""
    parts: dict[str, dict[int, str]] = {}
    lengths: dict[str, int] = {}
    unprobed = []
    for line in lines:
        words = line.split(" ")
        if len(words) != 5 or words[0] != probe.MARK or not (words[2] + words[3]).isdigit():
            continue
        _, host, number, total, part = words
        if total == "0":
            unprobed.append(host)
        else:
            lengths[host] = int(total)
            parts.setdefault(host, {})[int(number)] = part
    contents = []
    for host, chunks in parts.items():
        if len(chunks) == lengths[host]:
            with contextlib.suppress(ValueError, zlib.error):
                packed = "".join(chunks[number] for number in sorted(chunks))
                contents.append(json.loads(zlib.decompress(base64.b64decode(packed))))
    return contents, unprobed
