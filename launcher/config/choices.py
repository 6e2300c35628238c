"""The choices of the configuration groups: the files of the trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from launcher.errors import nearest


def options_of(group: str, roots: Sequence[Path]) -> list[str]:
    """The choices of a group, such as ``gpt3/126m`` of ``training``; files that start with `_` are parts."""
    folders = [root / group for root in roots if (root / group).is_dir()]
    files = [(path.relative_to(folder), path) for folder in folders for path in folder.rglob("*.yaml")]
    return sorted({str(name.with_suffix("")) for name, path in files if path.name[0] != "_"})


def about(group: str, choice: str, roots: Sequence[Path]) -> str | None:
    """What the file of a choice says of itself: its first comment, up to a full stop."""
    path = next((file for root in roots if (file := root / group / f"{choice}.yaml").is_file()), None)
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    sentence, stop, _ = comment.partition(". ")
    return (sentence if stop else comment.removesuffix(".")) or None


def choice_hint(choice: str, options: Sequence[str]) -> str:
    """The nearest choice, and those there are: of the same family where there is one."""
    family = choice.split("/")[0]
    near = [name for name in options if name.startswith(f"{family}/")] or list(options)
    listing = f"valid: {', '.join(near) or 'none'}"
    # A family, or a part of files (`_base`), is near to all of them and to none.
    is_part = "/_" in f"/{choice}"
    is_family = choice == family and any(name.startswith(f"{family}/") for name in near)
    found = [] if is_part or is_family else nearest(choice, near)
    return f"did you mean {found[0]!r}? {listing}" if found else listing
