"""The files that a data preparation is to write."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from supervisor.files import read_text

# Beside its prefix, and in the tokenizer's directory.
_SUFFIXES = (".bin", ".idx", ".json")
_TOKENIZER = ("vocab.json", "merges.txt")


def wanted_outputs(script: Path) -> list[Path] | None:
    """The files, as the arguments in a job's script tell them; ``None`` if they do not."""
    found = {}
    try:
        lines = read_text(script).splitlines()
    except (OSError, ValueError):
        return None
    for line in lines:
        option = re.match(r"\s*(?P<word>'?--(?:output-prefix|tokenizer-dir)=.*?)(?: \\| &)?$", line)
        if option:
            try:
                name, _, value = shlex.split(option["word"])[0].partition("=")
            except ValueError:  # a quotation that does not end: none of our scripts
                return None
            found[name] = value
    if len(found) != 2:
        return None
    prefix, tokenizer = found["--output-prefix"], Path(found["--tokenizer-dir"])
    return [*(Path(f"{prefix}{suffix}") for suffix in _SUFFIXES), *(tokenizer / name for name in _TOKENIZER)]
