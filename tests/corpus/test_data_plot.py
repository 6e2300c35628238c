"""Plots of a data set's manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UserError
from launcher.ui.plotting import draw, read_counts
from tests.forked_slipway import SLIPWAY
from tests.integration.conftest import run_command

MANIFEST: dict[str, Any] = {
    "version": 1,
    "counts": {
        "documents": 160,
        "tokens": 4000,
        "bad": 3,
        "dropped": {"short": 8, "exact duplicate": 80, "bad\x1b[31m\n$x$": 1},
    },
    "lengths": {"4": 100, "32": 50, "1024": 10},
    "samples": {},
}


def test_classes_of_lengths_have_no_gaps_and_reasons_are_ordered() -> None:
    data = read_counts("web", MANIFEST)
    assert data.lengths == {4: 100, 8: 0, 16: 0, 32: 50, 64: 0, 128: 0, 256: 0, 512: 0, 1024: 10}
    assert list(data.dropped.items())[:3] == [("exact duplicate", 80), ("short", 8), ("not readable", 3)]
    assert data.subtitle == "160 documents  ·  4k tokens  ·  25 tokens a document  ·  92 of 252 dropped"
    assert read_counts("w", {**MANIFEST, "lengths": {"0": 2, "1": 1}}).lengths == {0: 2, 1: 1}


def test_bars_are_as_long_as_their_numbers() -> None:
    lines = draw(read_counts("web", MANIFEST), 50, coloured=False).splitlines()
    room = 50 - len("512-1023") - len("100") - 4
    assert lines[1] == "     4-7  100  " + "█" * room
    assert lines[2] == "    8-15    0"
    assert lines[4] == "   32-63   50  " + "█" * (room // 2) + "▌"
    assert lines[9].startswith("   1k-2k   10  ███▌")
    assert max(map(len, lines)) <= 50
    assert "\x1b" not in "".join(lines)
    many = {**MANIFEST["counts"], "dropped": {f"reason {number:02}": 50 - number for number in range(20)}}
    lines = draw(read_counts("web", {**MANIFEST, "counts": many}), 80, coloured=True).splitlines()
    assert lines[-1].startswith(f"9 other reasons  {sum(range(31, 39)) + 3}  \x1b[38;2;")


def test_file_that_is_no_manifest_is_refused() -> None:
    for broken in ({}, {"counts": []}, {**MANIFEST, "lengths": {"many": 1}}, {**MANIFEST, "lengths": []}):
        with pytest.raises(UserError, match="web: not a manifest of data"):
            read_counts("web", broken)


def test_the_command_prints_and_writes_a_picture(tmp_path: Path) -> None:
    (tmp_path / "web.manifest.json").write_text(json.dumps(MANIFEST))
    done = run_command(SLIPWAY, "data", "plot", "web.bin", cwd=tmp_path)
    assert done.stdout.splitlines()[:4] == [
        "documents    160",
        "tokens       4,000",
        "mean length  25.0 tokens",
        "dropped      92",
    ]
    assert done.stdout.splitlines()[-1] == "plot: web.png"
    assert (tmp_path / "web.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "web.png").unlink()
    # A split has the manifest of the whole.
    done = run_command(SLIPWAY, "data", "plot", "web_train", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["lengths"] == MANIFEST["lengths"]
    assert not list(tmp_path.glob("*.png"))
    refusal = run_command(SLIPWAY, "data", "plot", "wep", cwd=tmp_path, check=2)
    assert "wep.manifest.json: there is no such file" in refusal.stderr
    (tmp_path / "broken.manifest.json").write_text("[1")
    refusal = run_command(SLIPWAY, "data", "plot", "broken", cwd=tmp_path, check=2)
    assert "not a manifest of data" in refusal.stderr and "Traceback" not in refusal.stderr
