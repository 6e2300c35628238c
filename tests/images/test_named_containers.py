"""`slipway image prune --named`: containers that launches left on nodes, without a real Slurm or Enroot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.cli.app import main

Capsys = pytest.CaptureFixture[str]

# Each node is a directory with a file for each container; `held` has no room for a job.
_SINFO = "#!/bin/sh\nls {here}/nodes\n"
_SRUN = """#!/bin/bash
for word; do case $word in --nodelist=*) export NODE=${{word#*=}} ;; esac; done
echo "$NODE" >>{here}/asked
[[ $NODE != held ]] || {{ echo "srun: error: Unable to allocate resources: Nodes are busy" >&2; exit 1; }}
while [[ $1 != sh ]]; do shift; done
exec "$@"
"""
_ENROOT = """#!/bin/bash
cd {here}/nodes/$NODE
if [[ $1 == list ]]; then ls; else rm -f -- "${{@: -1}}"; fi
"""
_IDLE = "0123456789ab"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sinfo", _SINFO), ("srun", _SRUN), ("enroot", _ENROOT)):
        (programs / name).write_text(text.format(here=tmp_path))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "nodes"
    for node, names in {
        "n1": [f"pyxis_kept-{_IDLE}", f"pyxis_other-{_IDLE}", "pyxis_17.0", "ubuntu"],
        "n2": [f"pyxis_kept-{_IDLE}", f"pyxis_kept-more-{_IDLE}"],
    }.items():
        (directory / node).mkdir(parents=True)
        for name in names:
            (directory / node / name).touch()
    return directory


def containers_by_node(nodes: Path) -> dict[str, list[str]]:
    return {node.name: sorted(path.name for path in node.iterdir()) for node in sorted(nodes.iterdir())}


def test_a_name_is_removed_from_all_nodes_and_nothing_else(nodes: Path, capsys: Capsys) -> None:
    before = containers_by_node(nodes)
    words = ["image", "prune", "--named", "kept", "cluster=bcm", "--json"]
    assert main([*words, "--dry-run"]) == 0
    expected = [{"node": node, "name": f"kept-{_IDLE}", "state": "idle"} for node in ("n1", "n2")]
    assert json.loads(capsys.readouterr().out) == expected
    assert containers_by_node(nodes) == before
    assert main([*words, "--yes"]) == 0
    assert {entry["state"] for entry in json.loads(capsys.readouterr().out)} == {"removed"}
    assert containers_by_node(nodes) == {
        "n1": ["pyxis_17.0", f"pyxis_other-{_IDLE}", "ubuntu"],
        "n2": [f"pyxis_kept-more-{_IDLE}"],
    }
    assert main([*words, "--yes"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_node_without_room_is_named(nodes: Path, capsys: Capsys) -> None:
    (nodes / "held").mkdir()
    assert main(["image", "prune", "--named", "*", "cluster=bcm", "--yes"]) == 1
    printed = capsys.readouterr()
    assert "slipway: held: skipped: " in printed.err and "Nodes are busy" in printed.err
    assert containers_by_node(nodes) == {"held": [], "n1": ["pyxis_17.0", "ubuntu"], "n2": []}
