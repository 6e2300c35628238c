"""The owners of a checkpoint's files: it is loaded only if they are trusted."""

from __future__ import annotations

import pwd
from collections.abc import Collection
from pathlib import Path

_KEY = "training.resume.trust_owner"


def why_untrusted(checkpoint: Path, own: Collection[int], trusted: str | None) -> tuple[str, str] | None:
    """Return the owner of a checkpoint's file, and how to trust that user; None if all are trusted.

    `own` are the numbers of the users whose files count as one's own, `trusted` is another's name or number.
    """
    for path in (checkpoint, *sorted(checkpoint.rglob("*"))):
        try:
            owner = path.stat().st_uid
        except FileNotFoundError:
            # A link that leads nowhere.
            continue
        name = _name(owner)
        if owner not in own and trusted not in (str(owner), name):
            why = f"{path} belongs to {name} (user {owner}), neither to you nor to root"
            rule = "a checkpoint is loaded only if its owner is trusted"
            return f"{why}: {rule}", f"{_KEY}={name} trusts that user"
    return None


def _name(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)
