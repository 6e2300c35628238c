"""Of a job's paths those on disks that this machine has for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.checks.gathering.data_sets import data_sets
from launcher.checks.gathering.path_resolver import Ground
from launcher.checks.gathering.tokenizers import tokenizer_files
from launcher.checks.path_facts import LocalPath, LocalPaths
from launcher.drafting import Draft, results_key
from launcher.file_systems import local_mount, mount_of

# What each machine has of its own, as a rule installed alike.
_INSTALLED = ("/bin/", "/opt/", "/usr/")


def local_paths(ground: Ground) -> LocalPaths | None:
    """What other machines do not see of a job's paths; ``None`` if the system does not tell."""
    if ground.nodes_are_here:
        return LocalPaths((), ())
    if mount_of(Path("/")) is None:
        return None
    run_dir = ground.plan.paths.run_dir
    results = (results_key(ground.made), results_value(ground.made), run_dir)
    return LocalPaths(tuple(_local([results])), tuple(_local(_inputs(ground))))


def results_value(made: Draft) -> str:
    """What the key has that says where the run is."""
    whole = results_key(made) == "base_results_dir"
    return made.composition.config.base_results_dir if whole else str(made.plan.paths.run_dir)


def _local(paths: Iterable[tuple[str, str, Path]]) -> Iterator[LocalPath]:
    for key, given, path in paths:
        mount = local_mount(path)
        if mount is not None:
            yield LocalPath(key, given, mount.kind, str(mount.point))


def _inputs(ground: Ground) -> Iterator[tuple[str, str, Path]]:
    """What the job reads, as far as it is here: what is not is for other checks to tell."""
    job = ground.plan.job
    found: list[tuple[str, str, Path | None]] = []
    if job.container is not None and ground.in_container:
        found.append(("container", job.container.image, Path(job.container.image)))
    elif not job.payload.argv[0].startswith(_INSTALLED):
        found.append(("cluster.python", job.payload.argv[0], Path(job.payload.argv[0])))
    for key, prefix in data_sets(ground):
        path = ground.host(prefix)
        found.append((key, prefix, path.with_name(f"{path.name}.bin") if path is not None else None))
    found += [(key, given, ground.host(given)) for key, given in tokenizer_files(ground)]
    for key, given, path in found:
        if path is not None and path.is_absolute() and _is_there(path):
            yield key, given, path


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
