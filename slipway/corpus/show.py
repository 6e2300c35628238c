"""One document of a data set as a JSON object: ``python -m slipway.corpus.show PREFIX --document N``."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipway.arithmetic.indexed import manifest_path
from slipway.common.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from slipway.corpus.datasets import find_data_set, open_data_set
from slipway.corpus.decoding import open_decoder


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a document; return the exit code."""
    options = _parse(arguments)
    try:
        answer = show(options.prefix, options.document, options.tokenizer)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    json.dump(answer, sys.stdout)
    return EXIT_OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.corpus.show", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("prefix", type=Path, help="path of the .bin and .idx without extension")
    parser.add_argument("--document", type=int, default=0, help="its number, from 0; -1 is the last one")
    parser.add_argument("--tokenizer", type=Path, help="directory or file of the tokenizer")
    return parser.parse_args(arguments)


def show(path: Path, number: int, tokenizer: Path | None) -> dict[str, Any]:
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
    """Return the files with the digest of the manifest, beside the data or in a directory there."""
    try:
        tokenizer = json.loads(manifest_path(prefix).read_bytes())["tokenizer"]
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


if __name__ == "__main__":
    sys.exit(main())
