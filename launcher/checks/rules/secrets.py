"""Files of secrets."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from launcher.checks.facts import Facts
from launcher.checks.findings import Finding, Severity, error, warning
from launcher.errors import one_line
from launcher.plan import Plan


def file_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """The job reads a secret as it starts, and ends there without its file."""
    for lost in facts.lost_secrets or ():
        fix = f"the whole path of a file whose first line is the secret, or {lost.key}=null"
        if lost.certain:
            yield error("secret.file", lost.key, lost.path, lost.why, fix)
        else:
            told = f"{lost.why} on this machine; every node must have it"
            yield warning("secret.file", lost.key, lost.path, told, fix)


def permission_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """A file of a secret that others may read is no secret."""
    for variable, path in (facts.open_secrets or {}).items():
        told = f"{one_line(path)}, which {variable} is read from, may be read by others than its owner"
        yield Finding("secret.permissions", Severity.WARNING, None, told, f"chmod 600 {shlex.quote(path)}")
