"""Check the files that a job reads, writes and mounts, and its secrets."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import partial

from launcher.checks import facts
from launcher.checks.findings import Check, Finding, Severity, check, error, name_likewise, warning
from launcher.errors import escape
from launcher.estimates.values import full


def missing_path_problems(paths: facts.PathFacts, part: str) -> Iterator[Finding]:
    """Find missing paths of one kind: an error if certain, else a warning."""
    groups: dict[tuple[str, bool], list[facts.MissingPath]] = {}
    for lack in getattr(paths, part):
        groups.setdefault((lack.why, lack.certain), []).append(lack)
    for first, *rest in groups.values():
        text, report = first.why, error if first.certain else warning
        text += name_likewise(lack.path if lack.key == first.key else full(lack.key) for lack in rest)
        also = tuple(dict.fromkeys(lack.key for lack in rest if lack.key != first.key))
        yield report(first.key, first.path, text, first.fix, also)


def path_check(check_id: str, part: str, topic: str) -> Check[...]:
    return Check(check_id, topic, partial(missing_path_problems, part=part), f"paths.{part}")


@check("secret.permissions", "files of secrets are their owner's alone", "open_secrets")
def permission_problems(open_secrets: Mapping[str, str]) -> Iterator[Finding]:
    for variable, path in open_secrets.items():
        text = f"{escape(path)}, which {variable} is read from, may be read by others than its owner"
        yield Finding(Severity.WARNING, None, text, f"chmod 600 {shlex.quote(path)}")


CHECKS = (
    path_check(
        "data.tokenizer",
        "tokens",
        "the data were made by the training's tokenizer, and their documents end with its token",
    ),
    path_check("secret.file", "secrets", "files of secrets exist, and can be read"),
    permission_problems,
    path_check("path.tokenizer", "tokenizer", "the tokenizer's files exist, and are valid"),
    path_check("path.data", "data", "the data sets exist, each .idx and .bin with as many tokens"),
    path_check("path.sources", "sources", "sources of a data preparation, conversion or evaluation exist"),
    path_check(
        "path.checkpoint",
        "checkpoint",
        "the checkpoint to resume from exists, and is complete",
    ),
    path_check(
        "path.script",
        "script",
        "the job's program exists: the engine's in its checkout, a command's own on the nodes",
    ),
    path_check("path.mounts", "mounts", "the sources of the container's mounts exist"),
    path_check("path.writable", "results", "the directory of the run can be written"),
    path_check("path.shared", "local", "shared paths of a job's nodes are not on this machine's own disks"),
)
