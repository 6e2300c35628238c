"""Releases of Slurm and of Python that the tests were run on: the tables of docs/versions.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher.doctor.lines import Status

SLURM = ("22.05", "24.11", "26.05")
PYTHON = ("3.11", "3.12", "3.13", "3.14")
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def judge(version: str, proven: Sequence[str]) -> tuple[Status, str]:
    """Compare a version with the proven releases, which are in ascending order.

    Returns
    -------
    tuple
        OK within their range, WARNING outside; and a note, empty for a proven release.
    """
    release, releases = _release(version), [_release(each) for each in proven]
    if release in releases:
        return Status.OK, ""
    within = releases[0] <= release <= releases[-1]
    return Status.OK if within else Status.WARNING, f"the tests were run on {', '.join(proven)}"


def _release(version: str) -> tuple[int, int]:
    """Return year and month of a Slurm, major and minor of a Python; zeros if the text has none."""
    match = _RELEASE.match(version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
