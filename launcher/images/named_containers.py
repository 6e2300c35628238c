"""Containers with names, which stay on the nodes where they were unpacked: finding and removing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase

from launcher.config.schema import ClusterConfig
from launcher.errors import UserError, end_of, one_line
from launcher.slurm.commands import Unreachable, ask, error_text, run
from launcher.slurm.environment import clean_environment

# The script of a launch adds digits of the image to the name.
_NAME = re.compile(r"pyxis_(?P<name>.+)-[0-9a-f]{12}")
_MARK = "slipway-container"
_AT_ONCE = 16
# To get a node for a moment, and for the work there.
_WAIT_SECONDS, _MINUTES = 20, 5
_PATIENCE_SECONDS = _WAIT_SECONDS + 60.0 * _MINUTES

# `$1` begins each line; the other words are removed, unless they are root directories of processes.
# `enroot list -f` finds no process where Enroot's directory is a bind mount.
_SCRIPT = """\
mark=$1
shift
command -v enroot >/dev/null || { echo "no enroot on PATH" >&2; exit 1; }
roots() {
    cat /proc/[0-9]*/mountinfo 2>/dev/null | awk '$5 == "/" { n = split($4, part, "/"); print part[n] }'
}
enroot list | while IFS= read -r name; do
    case $name in pyxis_*) ;; *) continue ;; esac
    state=idle
    ! roots | grep -Fxqe "$name" || state=runs
    for wanted; do
        if [ "$wanted" = "$name" ] && [ "$state" = idle ]; then
            enroot remove -f -- "$name" >/dev/null </dev/null && state=removed
        fi
    done
    echo "$mark $name $state"
done
"""


@dataclass(frozen=True, slots=True)
class NamedContainer:
    """A container on a node; `state` is ``idle``, ``runs`` or ``removed``."""

    node: str
    container: str
    state: str

    @property
    def name(self) -> str:
        """Its name, without the prefix of Pyxis."""
        return self.container.removeprefix("pyxis_")


@dataclass(frozen=True, slots=True)
class SkippedNode:
    """A node that could not be searched, and why."""

    node: str
    why: str


def nodes_of(cluster: ClusterConfig) -> list[str]:
    """Return the nodes that take jobs, of those that the cluster's keys name.

    Raises
    ------
    UserError
        If there is no Slurm, or no such node.
    """
    command = ["sinfo", "--noheader", "--Node", "--responding", "--format=%N"]
    for flag, value in (("partition", cluster.partition), ("nodes", cluster.nodelist)):
        command += [f"--{flag}={value}"] * (value is not None)
    answer = ask(command, clean_environment(cluster.slurm_conf))
    names = list(dict.fromkeys(answer.stdout.split()))
    if answer.code or not names:
        why = one_line(error_text(answer.stderr)) or "no node takes jobs there"
        raise UserError(f"--named: {why}", hint="cluster.partition=..., or cluster.nodelist=n1,n2")
    return names


def look(
    cluster: ClusterConfig, nodes: Sequence[str], pattern: str
) -> tuple[list[NamedContainer], list[SkippedNode]]:
    """Find the containers of this user that launches named, on each node that has room for a moment.

    Parameters
    ----------
    pattern
        Of the values of `container_options.name`, as for files: ``*`` is any.
    """
    containers, skipped = _on_each(nodes, lambda node: _run_step(cluster, node, ()))
    return [container for container in containers if _matches(container, pattern)], skipped


def remove(
    cluster: ClusterConfig, containers: Sequence[NamedContainer]
) -> tuple[list[NamedContainer], list[SkippedNode]]:
    """Remove containers, but not those in which a process runs by now."""
    by_node: dict[str, list[str]] = {}
    for container in containers:
        by_node.setdefault(container.node, []).append(container.container)
    results, skipped = _on_each(list(by_node), lambda node: _run_step(cluster, node, by_node[node]))
    requested = {(container.node, container.container) for container in containers}
    return [result for result in results if (result.node, result.container) in requested], skipped


def _matches(container: NamedContainer, pattern: str) -> bool:
    match = _NAME.fullmatch(container.container)
    return match is not None and fnmatchcase(match["name"], pattern)


def _on_each(
    nodes: Sequence[str], step: Callable[[str], list[NamedContainer] | SkippedNode]
) -> tuple[list[NamedContainer], list[SkippedNode]]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(step, nodes))
    containers = [item for answer in answers if not isinstance(answer, SkippedNode) for item in answer]
    return containers, [answer for answer in answers if isinstance(answer, SkippedNode)]


def _run_step(cluster: ClusterConfig, node: str, names: Sequence[str]) -> list[NamedContainer] | SkippedNode:
    command = ["srun", "--job-name=slipway-containers", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    command += ["--cpus-per-task=1", "--mem=100M", f"--time={_MINUTES}", f"--immediate={_WAIT_SECONDS}"]
    command += ["--chdir=/", "--mpi=none", "--quiet"]
    for flag in ("partition", "account", "qos", "reservation"):
        value = getattr(cluster, flag)
        command += [f"--{flag}={value}"] * (value is not None)
    environment = clean_environment(cluster.slurm_conf)
    # The node decides where Enroot keeps containers: Pyxis lets no job choose.
    environment = {key: value for key, value in environment.items() if not key.startswith("ENROOT_")}
    try:
        words_of = [*command, "sh", "-c", _SCRIPT, "sh", _MARK, *names]
        answer = run(words_of, environment, _PATIENCE_SECONDS, notify=False)
    except (Unreachable, TimeoutError) as error:
        return SkippedNode(node, one_line(str(error)) or "no answer")
    if answer.code:
        return SkippedNode(node, end_of(one_line(error_text(answer.stderr))))
    lines = (line.split(" ") for line in answer.stdout.splitlines())
    return [NamedContainer(node, line[1], line[2]) for line in lines if len(line) == 3 and line[0] == _MARK]
