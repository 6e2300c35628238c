"""Files: what the job reads, writes and mounts, its secrets, and the space for its checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence

from launcher.checks.facts import Facts, LocalPath, MissingPath, PathFacts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.errors import one_line
from launcher.estimates.checkpoints import KEEP, Checkpoints, checkpoints_of
from launcher.estimates.model import model_size
from launcher.estimates.values import Values, count, full
from launcher.plan import Plan

# So many of those with the same mistake are named.
_NAMED = 3

Find = Callable[[Plan, Facts], Iterable[Finding]]

_DIRECTORY = "exp_manager.checkpoint_callback_params.dirpath"


def missing_path_problems(check: str, of: Callable[[PathFacts], Sequence[MissingPath] | None]) -> Find:
    """Return the rule of one kind of path: an error where this machine can tell, else a warning."""

    def find(plan: Plan, facts: Facts) -> Iterator[Finding]:
        for alike in _alike((of(facts.paths) if facts.paths is not None else None) or ()):
            first, *rest = alike
            text = first.why
            others = list(dict.fromkeys(_other(lack, first) for lack in rest))
            if others:
                more = f" and {len(others) - _NAMED + 1} more" if len(others) >= _NAMED else ""
                text += f"; likewise {', '.join(others[: _NAMED - 1])}{more}"
            also = tuple(dict.fromkeys(lack.key for lack in rest if lack.key != first.key))
            tell = error if first.certain else warning
            yield tell(check, first.key, first.path, text, first.fix, also)

    return find


def _alike(lacks: Iterable[MissingPath]) -> list[list[MissingPath]]:
    """Group missing paths by their reason."""
    groups: dict[tuple[str, bool], list[MissingPath]] = {}
    for lack in lacks:
        groups.setdefault((lack.why, lack.certain), []).append(lack)
    return list(groups.values())


def _other(lack: MissingPath, first: MissingPath) -> str:
    """Return how a further path is named: by itself, or by its key."""
    return lack.path if lack.key == first.key else full(lack.key)


def shared_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find paths on disks of this machine that the nodes do not see."""
    most, local = max(plan.job.resources.node_counts), facts.paths.local if facts.paths is not None else None
    if most < 2 or local is None:
        return
    nodes = count(most, "node")
    for first in local.results:
        text = f"{_where(first)}; the job's {nodes} write to this directory together"
        fix = f"a directory that all nodes share: {full(first.key)}=..."
        yield warning("path.shared", first.key, first.path, text, fix)
    for first in local.inputs[:1]:
        others = tuple(dict.fromkeys(one.key for one in local.inputs if one.key != first.key))
        likewise = f" (likewise {', '.join(map(full, others))})" if others else ""
        text = f"{_where(first)}; each of the job's {nodes} must have it{likewise}"
        fix = "put it where all nodes share it, or a copy on each of them"
        yield warning("path.shared", first.key, first.path, text, fix, others)


def _where(found: LocalPath) -> str:
    return f"it lies on a file system of this machine's own ({found.kind}, mounted at {found.mount})"


def file_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find files of secrets that the job could not read as it starts."""
    for lost in facts.missing_secrets or ():
        fix = f"the whole path of a file whose first line is the secret, or {lost.key}=null"
        if lost.certain:
            yield error("secret.file", lost.key, lost.path, lost.why, fix)
        else:
            text = f"{lost.why} on this machine; every node must have it"
            yield warning("secret.file", lost.key, lost.path, text, fix)


def permission_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find files of secrets that others may read."""
    for variable, path in (facts.open_secrets or {}).items():
        text = f"{one_line(path)}, which {variable} is read from, may be read by others than its owner"
        yield Finding("secret.permissions", Severity.WARNING, None, text, f"chmod 600 {shlex.quote(path)}")


def checkpoint_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Find too little space for the next checkpoint, or for all that are kept.

    Those that the run has already have their space.
    """
    paths, values = facts.paths, Values(plan.job.config or {})
    free = paths.free_bytes if paths is not None else None
    model = model_size(values)
    saved = checkpoints_of(values, model, plan.job.engine) if model is not None else None
    if free is None or saved is None:
        return
    there = (paths.checkpoints_there if paths is not None else None) or 0
    more = max(1, saved.most - there)
    left = f"{told_bytes(free)} are free" + (" (by the quota)" if paths and paths.free_by == "quota" else "")
    if saved.size > free:
        tell, whose = (warning, " of this machine's own disk") if _is_own_disk(plan, facts) else (error, "")
        yield tell(
            "space.checkpoints",
            _DIRECTORY,
            values.raw(_DIRECTORY),
            f"a checkpoint takes about {told_bytes(saved.size)}, and {left}{whose}",
            "base_results_dir=... where there is more space",
        )
    elif more * saved.size > free:
        yield warning(
            "space.checkpoints",
            KEEP,
            values.raw(KEEP),
            f"{count(more, 'more checkpoint' if there else 'checkpoint')} of about {told_bytes(saved.size)}"
            f" take {told_bytes(more * saved.size)}, and {left}: enough for"
            f" {free // saved.size}",
            _fix(saved, there + free // saved.size, plan.job.engine),
            also=(_DIRECTORY,),
        )


def _is_own_disk(plan: Plan, facts: Facts) -> bool:
    """Return True if the nodes of the job cannot write to the disk that was looked at, as on a laptop."""
    local = facts.paths.local if facts.paths is not None else None
    return local is not None and bool(local.results) and max(plan.job.resources.node_counts) > 1


def _fix(saved: Checkpoints, room: int, engine: str) -> str:
    elsewhere = "base_results_dir=... where there is more space"
    if engine == "megatron_lm":
        return f"fewer: Megatron-LM keeps them all; or {elsewhere}"
    beside = saved.beside
    return f"{full(KEEP)}={room - beside}, or {elsewhere}" if room > beside else elsewhere


def told_bytes(size: int) -> str:
    """Format a size as disks are sold, in powers of ten."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}" if size < 1000 * bytes_ else f"{size / bytes_:,.0f} {unit}"
    return f"{size} bytes"
