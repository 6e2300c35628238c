"""The commands of the documentation that launch on a cluster, each as a dry run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launcher.cli.app import main

DOCS = Path(__file__).parents[2] / "docs"
# Parts of commands that need files of the reader's own, or more words.
_OWN = ("--config-dir", "restore_from_path", "--build", " ...")


def commands() -> list[str]:
    """Return the whole commands that need no file of the reader's."""
    launches = []
    for page in sorted(DOCS.glob("*.md")):
        blocks = re.findall(r"^```(?:bash|text)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
        launches += [line for line in lines if line.startswith("slipway launch ")]
    return [line for line in launches if not any(word in line for word in _OWN)]


@pytest.mark.parametrize("command", commands())
def test_documented_launch_is_rendered(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(command, comments=True)
    words = [word for word in words if word != "--follow"]
    assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err
    assert "#!/bin/bash\n" in capsys.readouterr().out
