"""Whether an image that is there is the one that is wanted."""

from __future__ import annotations

from typing import NamedTuple

from launcher.errors import UserError, one_line
from launcher.images.squashing import AUTO, SQUASH_OPTIONS
from launcher.images.store import Stored
from launcher.images.superblock import read_superblock


class Verdict(NamedTuple):
    """Whether it serves, and what is to be told about that."""

    yes: bool
    note: str = ""


def reusable(found: Stored, digest: str | None, compression: str) -> Verdict:
    """Judge a file that has the name of the image.

    Parameters
    ----------
    digest
        Of the image that is wanted; ``None`` where it cannot be told.
    compression
        What is wanted; whatever it has will do for ``auto``.
    """
    name = one_line(found.path.name)
    try:
        read_superblock(found.path)
    except UserError as error:
        return Verdict(False, f"{error.message}: imported anew")
    except OSError as error:
        return Verdict(False, f"{name}: {(error.strerror or str(error)).lower()}: imported anew")
    recorded = found.sidecar
    if recorded is None:
        return Verdict(True, f"{name} has no record of what it is: taken by its name (--force makes it anew)")
    if digest is None or recorded.digest is None:
        return Verdict(
            True, f"{name} is taken by its name: its digest cannot be told (--force makes it anew)"
        )
    if recorded.digest != digest:
        return Verdict(False, f"the image has changed: it was {recorded.digest}, and is {digest}")
    if compression not in (AUTO, recorded.compression):
        return Verdict(False, f"{name} is packed with {recorded.compression}: packed anew")
    if compression != AUTO and recorded.squash_options != SQUASH_OPTIONS[compression]:
        return Verdict(False, f"{name} is packed with {' '.join(recorded.squash_options)}: packed anew")
    return Verdict(True)
