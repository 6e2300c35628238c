"""The page about failures has the rules as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slipway.common.node.judging import RULES


def test_the_page_of_rules_is_not_stale(repository: Path) -> None:
    command = [sys.executable, repository / "scripts" / "failures_page.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_rule_in_the_order_of_the_table(repository: Path) -> None:
    rows = [
        line.split(" | ")[:3]
        for line in (repository / "docs" / "failures.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert rows == [[f"| `{rule.name}`", rule.of, rule.verdict] for rule in RULES]
