"""Files and directories that the job reads, writes and mounts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, error, warning
from launcher.checks.path_facts import Lack, LocalPath, PathFacts
from launcher.estimates.values import count, full
from launcher.plan import Plan

# So many of those with the same mistake are named.
_NAMED = 3

Find = Callable[[Plan, Facts], Iterable[Finding]]


def lack_problems(check: str, of: Callable[[PathFacts], Sequence[Lack] | None]) -> Find:
    """The check of one kind of path: an error where this machine can tell, a warning where it cannot."""

    def find(plan: Plan, facts: Facts) -> Iterator[Finding]:
        for alike in _alike((of(facts.paths) if facts.paths is not None else None) or ()):
            first, *rest = alike
            told = first.why
            others = list(dict.fromkeys(_other(lack, first) for lack in rest))
            if others:
                more = f" and {len(others) - _NAMED + 1} more" if len(others) >= _NAMED else ""
                told += f"; likewise {', '.join(others[: _NAMED - 1])}{more}"
            also = tuple(dict.fromkeys(lack.key for lack in rest if lack.key != first.key))
            tell = error if first.certain else warning
            yield tell(check, first.key, first.path, told, first.fix, also)

    return find


def _alike(lacks: Iterable[Lack]) -> list[list[Lack]]:
    """Those with the same mistake together."""
    groups: dict[tuple[str, bool], list[Lack]] = {}
    for lack in lacks:
        groups.setdefault((lack.why, lack.certain), []).append(lack)
    return list(groups.values())


def _other(lack: Lack, first: Lack) -> str:
    """What is told of a further one: its path, or the key that it is of."""
    return lack.path if lack.key == first.key else full(lack.key)


def shared_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Nodes that are not this machine see nothing of its own disks."""
    most, local = max(plan.job.resources.node_counts), facts.paths.local if facts.paths is not None else None
    if most < 2 or local is None:
        return
    nodes = count(most, "node")
    for first in local.results:
        told = f"{_where(first)}; the job's {nodes} write to this directory together"
        fix = f"a directory that all nodes share: {full(first.key)}=..."
        yield warning("path.shared", first.key, first.path, told, fix)
    for first in local.inputs[:1]:
        others = tuple(dict.fromkeys(one.key for one in local.inputs if one.key != first.key))
        likewise = f" (likewise {', '.join(map(full, others))})" if others else ""
        told = f"{_where(first)}; each of the job's {nodes} must have it{likewise}"
        fix = "put it where all nodes share it, or a copy on each of them"
        yield warning("path.shared", first.key, first.path, told, fix, others)


def _where(found: LocalPath) -> str:
    return f"it lies on a file system of this machine's own ({found.kind}, mounted at {found.mount})"
