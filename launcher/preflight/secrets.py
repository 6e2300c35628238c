"""Files of secrets."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from launcher.errors import one_line
from launcher.plan import Plan
from launcher.preflight.facts import Facts
from launcher.preflight.findings import Finding, Severity


def permission_problems(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """A file of a secret that others may read is no secret."""
    for variable, path in (facts.open_secrets or {}).items():
        told = f"{one_line(path)}, which {variable} is read from, may be read by others than its owner"
        yield Finding("secret.permissions", Severity.WARNING, None, told, f"chmod 600 {shlex.quote(path)}")
