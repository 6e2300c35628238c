"""Write the table of checks into docs/checks.md, from the registry.

    python scripts/checks_page.py [--check]

Ids and sentences are those of the checks, in their order. What a check finds, and its severity, is written by
hand into the last two cells of its row, which the script keeps.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from launcher.checks.registry import CHECKS  # noqa: E402

PAGE = ROOT / "docs" / "checks.md"
_HEAD = "| id | checks that | finds | severity |\n|---|---|---|---|\n"
_TABLE = re.compile(rf"{re.escape(_HEAD)}(?:\|.*\n)*")
_ROW = re.compile(r"\| `(?P<id>[\w.]+)` \|[^|]*\| (?P<by_hand>.*) \|")


def page(text: str) -> str:
    """Return the page with its table written anew."""
    by_hand = {row["id"]: row["by_hand"] for row in _ROW.finditer(text)}
    rows = (f"| `{check.id}` | {check.tells} | {by_hand.get(check.id, ' | error')} |\n" for check in CHECKS)
    return _TABLE.sub(lambda _: f"{_HEAD}{''.join(rows)}", text, count=1)


def main() -> int:
    """Write the page, or report whether it is stale."""
    parser = argparse.ArgumentParser(description="Write the table of checks into docs/checks.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if it is stale")
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if not parser.parse_args().check:
        PAGE.write_text(after, encoding="utf-8")
    elif before != after:
        print("docs/checks.md is stale: python scripts/checks_page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
