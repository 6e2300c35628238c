"""Failures that end a data preparation, and records that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipway.common.errors import UserError, escape_lines
from slipway.common.extras import install_command
from slipway.corpus.units import SourceFile

# With this begins the defect of a record without the key of its text.
NO_KEY = "no key"
# And that of a line of too many bytes.
LONG_LINE = "line longer than"
# Names of each reason that a line has.
_SHOWN = 5
# Ctrl-C, as a shell says it.
EXIT_INTERRUPTED = 130


class OutsideError(Exception):
    """Failure of the network, a server or a disk; shown without a traceback, exit code 1."""

    def __str__(self) -> str:
        return escape_lines(super().__str__())


@dataclass(frozen=True, slots=True)
class BadRecord:
    """Record of a source that is no document.

    Attributes
    ----------
    file
        Number of the source file.
    offset
        Byte offset of a line, else number of the row or record.
    reason
        Short text that is the same for all records with this defect, such as ``not UTF-8``.
    is_loss
        True if an unknown number of documents is lost with it; it is never skipped.
    """

    file: int
    offset: int
    reason: str
    is_loss: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """File, or member of a tar shard, that is not read, and the reason."""

    name: str
    reason: str


def list_omitted(left_out: Sequence[LeftOut], count: int | None = None) -> str:
    """Return how much is left out, by default the number of names, and each reason's first names."""
    texts = []
    for reason in dict.fromkeys(entry.reason for entry in left_out):
        names = [entry.name for entry in left_out if entry.reason == reason]
        texts.append(f"{reason}: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}")
    return f"{count or len(left_out):,} files or members left out ({'; '.join(texts)})"


def refusal(file: SourceFile, bad: BadRecord) -> UserError:
    """Return the error for a bad record of a source, where ``on_error=raise``."""
    if bad.reason.startswith(LONG_LINE):
        hint = "a longer text can be a separate file, such as .txt, and `jq -c '.[]'` divides an array"
    elif bad.reason.startswith(NO_KEY):
        hint = (
            "the key or column of the text is data_preparation.text_key, or that of this file alone: "
            "{path: ..., text_key: ...} among the inputs"
        )
    elif bad.is_loss:
        hint = (
            "an unknown number of documents is lost with it, so that on_error=skip does not skip it: mend "
            "the file, or leave it out of the inputs; `slipway data lint` names all such files"
        )
    else:
        hint = (
            "data_preparation.on_error=skip leaves such records out, counts and names them, up to "
            "data_preparation.max_errors"
        )
    return UserError(f"{place(file, bad)}; {hint}")


# The unit of a record's offset, by the format of its source; a text file is one record.
COUNTED = {"jsonl": "byte", "parquet": "row", "wikipedia": "page", "tar": "member"}


def place(file: SourceFile, bad: BadRecord) -> str:
    """Name a bad record of a source, and its defect."""
    at = f", {COUNTED[file.format]} {bad.offset:,}" if file.format in COUNTED else ""
    return f"{file.name}{at}: {bad.reason}"


def missing_library(name: str, purpose: str, extra: str = "data") -> UserError:
    """Return the error for a library of an extra that is not installed."""
    return UserError(
        f"{purpose} needs the library {name}, which is not installed: install Slipway with the extra "
        f"`{extra}` ({install_command(extra)})"
    )
