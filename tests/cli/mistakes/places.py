"""The files and directories that the mistakes name, and the assertion that all mistakes share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.cli.app import main

Rows = list[tuple[list[str], list[str]]]

SHIPPED = "conf/cluster/bcm.yaml:11"
LOCAL = ["cluster=local", "training=gpt3/tiny"]
MOCK = "training.model.data.data_impl=mock"

# The files of a user's configuration tree, by the choice that reads each.
TREE = {
    "syntax": "defaults: [bcm, _self_]\npartition: [a\nx: 1\n",
    "tab": "account:\n\tx: 1\n",
    "twice": "defaults: [bcm, _self_]\nmem: 1\nmem: 2\n",
    "listing": "- partition\n- account\n",
    "unknown": "defaults: [bcm, _self_]\n\npartion: p5\n",
    "typed": "defaults: [bcm, _self_]\nexclusive: maybe\n",
    "broken": "defaults: [bcm, _self_]\naccount: ${nope\n",
    "dangling": "defaults: [bcm, _self_]\naccount: ${cluster.partion}\n",
    "orphan": "partition: p5\n",
    "circle": "defaults: [circle, _self_]\n",
    "heir": "defaults:\n  - bmc\n  - _self_\n",
    "scalar": "defaults: bcm\n",
}


@dataclass(frozen=True)
class Places:
    """The paths that the mistakes name; `@tree` and so on stand for them in a row."""

    tree: Path
    templates: Path
    images: Path
    bare: Path  # an interpreter without libraries
    file: Path

    def fill(self, text: str) -> str:
        for name in ("tree", "templates", "images", "bare", "file"):
            text = text.replace(f"@{name}", str(getattr(self, name)))
        return text


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        return main(arguments)
    except SystemExit as end:  # argparse
        assert isinstance(end.code, int)
        return end.code


def assert_mistake(
    arguments: list[str],
    words: list[str],
    places: Places,
    directory: Path,
    repository: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Assert that a command line is refused with a message that has `words`, and that nothing is written."""
    code = run([places.fill(argument) for argument in arguments])
    output = capsys.readouterr()
    for word in words:
        assert places.fill(word).replace("@@", f"{repository}/") in output.err
    assert (code, output.out) == (2, "")
    assert "Traceback" not in output.err
    assert "slipway: " in output.err
    assert not any(ord(char) < 32 for char in output.err.replace("\n", ""))
    assert list(directory.iterdir()) == []
