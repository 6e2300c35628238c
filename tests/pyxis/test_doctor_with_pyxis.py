"""`slipway doctor` where Pyxis and Enroot are installed: it finds both, and starts an image."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.app import main
from launcher.sandbox.lifecycle import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.pyxis]


def statuses(out: str) -> dict[tuple[str, str], str]:
    """Return the status of each thing on each machine."""
    lines = json.loads(out)["lines"]
    return {(line["what"], where): line["status"] for line in lines for where in line["where"]}


def test_an_image_starts_on_the_nodes(
    on_pyxis: Sandbox, shell_image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "cluster=sandbox", f"container={shell_image}", "--nodes", "2", "--start", "--json"]
    assert main(words) == 0
    status = statuses(capsys.readouterr().out)
    assert status["pyxis", "here"] == "ok"
    for node in ("n1", "n2"):
        for what in ("pyxis.plugin", "image", "enroot", "enroot.runtime", "enroot.data", "container"):
            assert status[what, node] == "ok", what


def test_file_that_is_no_image_starts_nowhere(
    on_pyxis: Sandbox, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn.sqsh"
    torn.write_bytes(b"torn" * 99)
    words = ["doctor", "cluster=sandbox", f"container={torn}", "--nodes", "2", "--start"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "not a squashfs image" in out
    assert "the image starts on 0 of 2 nodes: " in out
    assert "missing for this launch: image, container" in out


def test_an_image_that_asks_for_gpus_is_reported_before_it_is_started(
    on_pyxis: Sandbox, cuda_image: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "cluster=sandbox", f"container={cuda_image}", "--nodes", "1", "--json"]
    assert main(words) == 1
    assert statuses(capsys.readouterr().out)["enroot.hooks", "n1"] == "missing"
    assert main([*words, "--start"]) == 1
    lines = json.loads(capsys.readouterr().out)["lines"]
    (row,) = (line for line in lines if line["what"] == "container")
    assert (row["where"], row["status"]) == (["n1"], "missing")
    assert "nvidia-container-cli" in row["found"]
    assert "env_vars.NVIDIA_VISIBLE_DEVICES=void" in row["fix"]
    assert main([*words, "--start", "env_vars.NVIDIA_VISIBLE_DEVICES=void"]) == 0
