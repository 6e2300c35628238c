"""The times that `status` reports of a job of a real Slurm, with and without accounting."""

from __future__ import annotations

import json
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import SLIPWAY, run_command

_ALL = ("submitted", "started", "ended", "last_transition")


@pytest.mark.slurm
@pytest.mark.parametrize("slurm", ["sandbox", "plain_sandbox"])
def test_each_transition_has_its_time(tmp_path: Path, request: pytest.FixtureRequest, slurm: str) -> None:
    conf = {"SLURM_CONF": request.getfixturevalue(slurm).environment()["SLURM_CONF"]}
    payload = tmp_path / "payload"
    go = tmp_path / "go"
    payload.write_text(f'#!/bin/sh\n[ "$1" = -c ] || until [ -e {go} ]; do sleep 0.2; done\n')
    payload.chmod(0o755)
    begin = time.time() - 1
    words = ["training=gpt3/tiny", "cluster=sandbox", "training.model.data.data_impl=mock"]
    words += ["training.trainer.num_nodes=1", f"cluster.python={payload}", "cluster.sbatch={hold: true}"]
    run_command(SLIPWAY, "launch", *words, cwd=tmp_path, **conf)

    def row(state: str) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while True:
            done = run_command(SLIPWAY, "status", "--json", cwd=tmp_path, check=None, **conf)
            (status,) = json.loads(done.stdout)
            if status["state"] == state:
                return {
                    name: status[name] and datetime.fromisoformat(status[name]).timestamp() for name in _ALL
                }
            assert time.monotonic() < deadline, status
            time.sleep(0.5)

    waits = row("PENDING")
    assert begin < waits["submitted"] == waits["last_transition"]
    assert waits["started"] is waits["ended"] is None
    run_command(SLIPWAY, "release", "gpt3_tiny", cwd=tmp_path, **conf)
    runs = row("RUNNING")
    assert runs["submitted"] == waits["submitted"] <= runs["started"] == runs["last_transition"]
    assert runs["ended"] is None
    time.sleep(2)
    go.touch()
    ended = row("COMPLETED")
    assert begin < ended["started"] <= ended["ended"] == ended["last_transition"] <= time.time() + 1
    assert ended["ended"] - ended["started"] >= 1
    # Only Slurm knows when a job that waits was cancelled with scancel.
    run_command(SLIPWAY, "launch", *words, cwd=tmp_path, **conf)
    begin = time.time() - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", conf["SLURM_CONF"])
        subprocess.run(["scancel", "--state=PENDING", "--jobname=nemo-megatron-gpt3_tiny"], check=True)
    cancelled = row("CANCELLED")
    assert cancelled["started"] is None
    assert begin < cancelled["ended"] == cancelled["last_transition"] <= time.time() + 1
