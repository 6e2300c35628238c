"""The table of checks: their ids, what each looks at, and which facts it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.checks.findings import REGISTERED, Check

# Each enters its checks into the table.
from launcher.checks.rules import (  # noqa: F401
    accounts,
    cluster,
    cluster_nodes,
    files,
    keys,
    layout,
    model,
    resources,
    runs,
    training,
)
from launcher.errors import UserError, did_you_mean

# The order in which findings are told: by the first part of an id, or by the whole of it.
_ORDER = (
    *("type", "layout", "memory", "batch", "elastic", "batch.accumulation", "model", "data", "profile"),
    *(
        "schedule",
        "time",
        "chain",
        "keys",
        "engine",
        "job",
        "run",
        "data.identity",
        "secret",
        "path",
        "image",
    ),
    *("space", "cluster", "cluster.array", "cluster.pyxis", "machine", "scheduler"),
)


CHECKS: tuple[Check, ...] = tuple(
    sorted(
        REGISTERED,
        key=lambda check: _ORDER.index(check.id if check.id in _ORDER else check.id.partition(".")[0]),
    )
)


def require_known(ids: Iterable[str], others: Sequence[str] = ()) -> None:
    """Refuse ids that no check has, nor the `others` that a verb looks at beside the checks."""
    known = [*(check.id for check in CHECKS), *others]
    for name in ids:
        if name not in known:
            text = f"--no-check={name}: there is no such check"
            raise UserError(text, hint=did_you_mean(name, known))
