"""Pruning: the images of the store that no run needs, and the named containers that stayed on nodes."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

from launcher.config.schema import ClusterConfig
from launcher.errors import UserError, end_of, escape
from launcher.images.importing import PARTIAL_PREFIX, REPLACED_PREFIX
from launcher.images.references import SQUASHFS_SUFFIXES
from launcher.images.scratch import is_locked, lock_image
from launcher.images.store import Stored, read_stored, sidecar_path
from launcher.jobs.launches import adopt
from launcher.jobs.locator import RunLocator, originals
from launcher.jobs.status import poll
from launcher.runs.known_trees import why_not_remembered
from launcher.slurm.commands import Unreachable, ask, error_text, run
from launcher.slurm.environment import clean_environment
from launcher.slurm.queue_flags import ADMITTING
from launcher.slurm.states import State

_DAY_SECONDS = 86400


@dataclass(frozen=True, slots=True)
class ImageUse:
    """A launch in an image, at some second since 1970; it `is_live` if its job waits or runs, or may."""

    run: str
    is_live: bool
    launched: float


def images_in_use(base_results_dir: Path, directory: Path) -> dict[Path, list[ImageUse]]:
    """Return the launches in images of a directory, by the image with links resolved.

    All known launches count: this user's and, in directories that were seen, others'. A job counts as live
    unless it is known to have ended. Raise UserError if the known runs cannot be listed.
    """
    if trouble := why_not_remembered():
        raise UserError(f"the known runs cannot be listed: {trouble}")
    directory, launches = directory.resolve(), []
    for launch in originals(RunLocator(base_results_dir).launches()):
        image = Path(launch.manifest.image or "")
        if image.is_absolute() and image.resolve().parent == directory:
            launches.append(launch)
    jobs = [launch for launch in adopt(launches) if not launch.is_without_job]
    uses: dict[Path, list[ImageUse]] = defaultdict(list)
    for launch, status in zip(jobs, poll(jobs), strict=True):
        is_live = status.state.is_live or status.state is State.UNKNOWN
        launched = datetime.fromisoformat(launch.manifest.created).timestamp()
        image = Path(launch.manifest.image or "").resolve()
        uses[image].append(ImageUse(launch.manifest.run, is_live, launched))
    return uses


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """A decision to keep or remove an image, and its reason."""

    entry: Stored
    remove: bool
    why: str


@dataclass(frozen=True, slots=True)
class PruneRules:
    """The user's limits: an image made or launched fewer than `older_than` seconds ago stays.

    Of the unneeded images the `keep` that were made or launched last stay.
    """

    keep: int = 0
    older_than: float = 0.0
    ended: bool = False


def decide(
    entries: Sequence[Stored], uses: Mapping[Path, Sequence[ImageUse]], rules: PruneRules, now: float
) -> list[PruneDecision]:
    """Decide about each image, in their order."""
    kept = {entry.path: why for entry in entries if (why := _reason_to_keep(entry, uses, rules, now))}
    unneeded = [entry for entry in entries if entry.path not in kept]
    unneeded.sort(key=lambda entry: _find_last_use(entry, uses), reverse=True)
    for entry in unneeded[: rules.keep]:
        kept[entry.path] = f"one of the newest {rules.keep} unneeded images"
    decisions = []
    for entry in entries:
        runs = [use.run for use in uses.get(entry.path.resolve(), ())]
        unused = f"{_name(runs)} ran in it, and has ended" if runs else "no known run needs it"
        decisions.append(PruneDecision(entry, entry.path not in kept, kept.get(entry.path, unused)))
    return decisions


def decide_leftovers(directory: Path, uses: Mapping[Path, Sequence[ImageUse]]) -> list[PruneDecision]:
    """Decide about hidden files: replaced images that jobs may have open, and parts of killed imports."""
    decisions: list[PruneDecision] = []
    for path in sorted(directory.glob(".*")):
        image, entry = _image_of(path), read_stored(path)
        if image is None or entry is None:
            continue
        if path.name[1:].startswith(f"{image.name}{PARTIAL_PREFIX}"):
            keep = is_locked(image)
            why = "being imported just now" if keep else f"a part of {image.name}: its import was ended"
        else:
            runs = [use.run for use in uses.get(image.resolve(), ()) if use.is_live]
            keep = bool(runs)
            why = f"{_name(runs)} may have it open" if runs else f"an older {image.name}"
        decisions.append(PruneDecision(entry, not keep, why))
    return decisions


def _image_of(hidden: Path) -> Path | None:
    """Return the image that a hidden file belongs to; ``None`` if it belongs to none."""
    for mark in (REPLACED_PREFIX, PARTIAL_PREFIX):
        name, separator, _ = hidden.name[1:].rpartition(mark)
        if separator and name.endswith(SQUASHFS_SUFFIXES):
            return hidden.with_name(name)
    return None


def _reason_to_keep(
    entry: Stored, uses: Mapping[Path, Sequence[ImageUse]], rules: PruneRules, now: float
) -> str | None:
    """Return why an image stays by itself, or ``None``."""
    launches = uses.get(entry.path.resolve(), ())
    live = [use.run for use in launches if use.is_live]
    if live:
        return f"{_name(live)} waits or runs, or may"
    if entry.path.is_symlink():
        return "a link, not an image"
    if entry.owner != os.getuid():
        return "another user's"
    if entry.sidecar is None:
        return "not made by slipway: it has no record"
    if launches and not rules.ended:
        return f"{_name([use.run for use in launches])} ran in it"
    age = now - _find_last_use(entry, uses)
    if age < rules.older_than:
        return f"needed {max(age, 0.0) / _DAY_SECONDS:.0f} days ago"
    return None


def _find_last_use(entry: Stored, uses: Mapping[Path, Sequence[ImageUse]]) -> float:
    return max([entry.modified, *(use.launched for use in uses.get(entry.path.resolve(), ()))])


def _name(runs: Sequence[str]) -> str:
    names = list(dict.fromkeys(runs))
    return names[-1] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def remove(entry: Stored) -> None:
    """Remove an image and its record; raise UserError if somebody imports it just now."""

    def refuse(holder: str) -> None:
        raise UserError(f"{escape(str(entry.path))}: {holder} imports it just now; it stays")

    with lock_image(_image_of(entry.path) or entry.path, refuse):
        # A record without an image is harmless; an image without a record would never be removed.
        entry.path.unlink()
        sidecar_path(entry.path).unlink(missing_ok=True)


# --- named containers on the nodes

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
            enroot remove_containers -f -- "$name" >/dev/null </dev/null && state=removed
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
    """Return the nodes that take jobs, of those that the cluster's keys name."""
    command = ["sinfo", "--noheader", "--Node", "--responding", "--format=%N"]
    # With a partition, which may be hidden, sinfo refuses --all.
    command += ["--all"] * (cluster.partition is None)
    for flag, value in (("partition", cluster.partition), ("nodes", cluster.nodelist)):
        command += [f"--{flag}={value}"] * (value is not None)
    answer = ask(command, clean_environment(cluster.slurm_conf))
    names = list(dict.fromkeys(answer.stdout.split()))
    if answer.code or not names:
        why = escape(error_text(answer.stderr)) or "no node takes jobs there"
        raise UserError(f"--named: {why}", hint="cluster.partition=..., or cluster.nodelist=n1,n2")
    return names


def look(
    cluster: ClusterConfig, nodes: Sequence[str], pattern: str
) -> tuple[list[NamedContainer], list[SkippedNode]]:
    """Find the containers of this user that launches named, on each node that has room for a moment.

    `pattern` is of the values of `container_options.name`, as for files: ``*`` is any.
    """
    containers, skipped = _run_on_nodes(cluster, dict.fromkeys(nodes, ()))
    matches = [(item, _NAME.fullmatch(item.container)) for item in containers]
    return [item for item, name in matches if name and fnmatchcase(name["name"], pattern)], skipped


def remove_containers(
    cluster: ClusterConfig, containers: Sequence[NamedContainer]
) -> tuple[list[NamedContainer], list[SkippedNode]]:
    """Remove containers, but not those in which a process runs by now."""
    names: dict[str, list[str]] = defaultdict(list)
    for item in containers:
        names[item.node].append(item.container)
    results, skipped = _run_on_nodes(cluster, names)
    return [item for item in results if item.container in names[item.node]], skipped


def _run_on_nodes(
    cluster: ClusterConfig, names: Mapping[str, Sequence[str]]
) -> tuple[list[NamedContainer], list[SkippedNode]]:
    """List the containers of nodes, after removing those of these names."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda node: _run_step(cluster, node, names[node]), names))
    containers = [item for answer in answers if not isinstance(answer, SkippedNode) for item in answer]
    return containers, [answer for answer in answers if isinstance(answer, SkippedNode)]


def _run_step(cluster: ClusterConfig, node: str, names: Sequence[str]) -> list[NamedContainer] | SkippedNode:
    command = ["srun", "--job-name=slipway-containers", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    command += ["--cpus-per-task=1", "--mem=100M", f"--time={_MINUTES}", f"--immediate={_WAIT_SECONDS}"]
    command += ["--chdir=/", "--mpi=none", "--quiet"]
    for flag in ADMITTING:
        value = getattr(cluster, flag)
        command += [f"--{flag}={value}"] * (value is not None)
    environment = clean_environment(cluster.slurm_conf)
    # The node decides where Enroot keeps containers: Pyxis lets no job choose.
    environment = {key: value for key, value in environment.items() if not key.startswith("ENROOT_")}
    try:
        command += ["sh", "-c", _SCRIPT, "sh", _MARK, *names]
        answer = run(command, environment, _PATIENCE_SECONDS, notify=False)
    except (Unreachable, TimeoutError) as error:
        return SkippedNode(node, escape(str(error)) or "no answer")
    if answer.code:
        return SkippedNode(node, end_of(escape(error_text(answer.stderr))))
    lines = (line.split(" ") for line in answer.stdout.splitlines())
    return [NamedContainer(node, line[1], line[2]) for line in lines if len(line) == 3 and line[0] == _MARK]
