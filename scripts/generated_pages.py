"""The command line of the scripts that write pages of the documentation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main(name: str, page: Callable[[str], str]) -> int:
    """Write a page anew, a function of its text so far; with ``--check`` report whether it is stale."""
    parser = argparse.ArgumentParser(description=f"Write docs/{name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is stale")
    path = DOCS / name
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    after = page(before)
    if not parser.parse_args().check:
        path.write_text(after, encoding="utf-8")
    elif before != after:
        print(f"docs/{name} is stale: python {sys.argv[0]}", file=sys.stderr)
        return 1
    return 0
