"""Data sets in Megatron's format: the tables of an ``.idx``, the tokens of a document and its source."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slipway.arithmetic import indexed
from slipway.common.errors import UserError, suggest
from slipway.corpus.tokenizers import open_decoder

SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class DataSet:
    """Tables of an ``.idx``, mapped into memory.

    Attributes
    ----------
    prefix
        Path of both files without their suffix.
    header
        Type of the tokens and sizes of the tables.
    lengths
        Tokens of each sequence, ``[sequences]``.
    pointers
        Byte of the ``.bin`` at which each begins, ``[sequences]``.
    boundaries
        First sequence of each document, and after them the number of sequences, ``[documents + 1]``.
    """

    prefix: Path
    header: indexed.IndexHeader
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    boundaries: npt.NDArray[np.int64]

    @property
    def documents(self) -> int:
        """Return the number of documents."""
        return max(len(self.boundaries) - 1, 0)

    def document(self, number: int) -> npt.NDArray[Any]:
        """Return the tokens of a document, ``[tokens]``."""
        parts = [
            np.memmap(
                f"{self.prefix}.bin",
                self.header.dtype,
                mode="r",
                offset=int(self.pointers[sequence]),
                shape=(int(self.lengths[sequence]),),
            )
            for sequence in range(int(self.boundaries[number]), int(self.boundaries[number + 1]))
            if self.lengths[sequence]
        ]
        return np.concatenate(parts) if parts else np.empty(0, self.header.dtype)

    def origin(self, number: int) -> indexed.Origin | None:
        """Return the source of a document; None if the data set has no origins.

        Raises
        ------
        UserError
            If the origins are not those of the data set.
        """
        if not indexed.origins_path(self.prefix).exists():
            return None
        try:
            return indexed.Origins(self.prefix, self.documents)[number]
        except (ValueError, OSError) as error:
            raise UserError(str(error)) from None


def prefix_of(path: Path) -> Path | None:
    """Return the prefix of a data set, given the prefix or one of its files, or None."""
    prefix = path.with_suffix("") if path.suffix in SUFFIXES else path
    return prefix if any(Path(f"{prefix}{suffix}").is_file() for suffix in SUFFIXES) else None


def find_data_set(path: Path) -> Path:
    """Return the prefix of a data set that is named by it or by one of its files.

    Raises
    ------
    UserError
        If it is missing.
    """
    prefix = prefix_of(path)
    if prefix is None:
        near = sorted(str(other.with_suffix("")) for other in path.parent.glob("*.idx"))
        raise UserError(
            f"{path}: no data set: there is neither {path}.bin nor .idx{suggest(str(path), near)}"
        )
    return prefix


def open_data_set(prefix: Path) -> DataSet:
    """Map the tables of ``prefix.idx``.

    Raises
    ------
    UserError
        If the file cannot be read, or is not of this format.
    """
    path = Path(f"{prefix}.idx")
    try:
        with path.open("rb") as stream:
            head, size = stream.read(indexed.HEADER.size), stream.seek(0, 2)
        header = indexed.parse_header(head, size)
        content: Any = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{prefix}: {error}") from None
    return DataSet(
        prefix,
        header,
        np.frombuffer(content, "<i4", header.sequences, indexed.HEADER.size),
        np.frombuffer(content, "<i8", header.sequences, header.pointers_at),
        np.frombuffer(content, "<i8", header.boundaries, header.boundaries_at),
    )


def read_document(path: Path, number: int, tokenizer: Path | None) -> dict[str, Any]:
    """Return a document of a data set.

    Parameters
    ----------
    path
        Prefix of the data set, or one of its files.
    number
        From 0; a negative one counts from the end.
    tokenizer
        Directory or file of the tokenizer; None takes that of the manifest.

    Returns
    -------
    dict
        ``prefix``, ``documents`` of the data set, ``document`` (its number), ``tokens`` (how many), ``ids``,
        ``source`` and ``offset`` (None if not known), and ``text`` (None without a tokenizer).

    Raises
    ------
    UserError
        If there is no such data set, document or tokenizer.
    """
    data = open_data_set(find_data_set(path))
    count = data.documents
    if not -count <= number < count:
        raise UserError(
            f"--document {number}: expected 0 to {count - 1}: {data.prefix} has {count:,} documents"
        )
    number %= count
    try:
        ids = data.document(number).tolist()
    except (OSError, ValueError) as error:
        raise UserError(f"{data.prefix}.bin: document {number} cannot be read: {error}") from None
    origin = data.origin(number)
    files = [tokenizer] if tokenizer is not None else tokenizer_of(data.prefix)
    return {
        "prefix": str(data.prefix),
        "documents": count,
        "document": number,
        "tokens": len(ids),
        "ids": ids,
        "source": origin.source if origin else None,
        "offset": origin.offset if origin else None,
        "text": open_decoder(files).decode(ids) if files else None,
    }


def tokenizer_of(prefix: Path) -> list[Path]:
    """Return the files with the manifest's digest in the data's directory or one directory below."""
    try:
        tokenizer = json.loads(indexed.manifest_path(prefix).read_bytes())["tokenizer"]
        names, digest = [Path(name).name for name in tokenizer["files"]], tokenizer["sha256"]
        places = [prefix.parent, *sorted(path for path in prefix.parent.iterdir() if path.is_dir())]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    for place in places:
        files = [place / name for name in names]
        if files and all(file.is_file() for file in files):
            content = b"".join(file.read_bytes() for file in files)
            if hashlib.sha256(content).hexdigest() == digest:
                return files
    return []
