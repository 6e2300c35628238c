"""Write the table of checks into docs/checks.md, from the registry.

    python scripts/checks_page.py [--check]

Ids and sentences are those of the checks, in their order. What a check finds, and its severity, is written by
hand into the last two cells of its row, which the script keeps.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.checks.registry import CHECKS  # noqa: E402
from scripts.generated_pages import main  # noqa: E402

_HEAD = "| id | checks that | finds | severity |\n|---|---|---|---|\n"
_TABLE = re.compile(rf"{re.escape(_HEAD)}(?:\|.*\n)*")
_ROW = re.compile(r"\| `(?P<id>[\w.]+)` \|[^|]*\| (?P<by_hand>.*) \|")


def page(text: str) -> str:
    """Return the page with its table written anew."""
    by_hand = {row["id"]: row["by_hand"] for row in _ROW.finditer(text)}
    rows = (f"| `{check.id}` | {check.topic} | {by_hand.get(check.id, ' | ')} |\n" for check in CHECKS)
    return _TABLE.sub(lambda _: f"{_HEAD}{''.join(rows)}", text, count=1)


if __name__ == "__main__":
    sys.exit(main("checks.md", page))
