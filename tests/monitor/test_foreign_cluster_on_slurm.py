"""Reading a run whose manifest names another user's cluster, on a real Slurm."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hostile_runs import NOBODY, run, verbs_about
from monitor_samples import Runs

from launcher.sandbox.lifecycle import Sandbox

TAG = "20261121-120000-abcdef"

_PLUGIN = """
#include <stdio.h>
__attribute__((constructor)) static void begin(void) { FILE *file = fopen("CANARY", "a"); fclose(file); }
"""


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the plugin is to be compiled")
def test_reading_a_run_loads_no_plugin_of_its_author(
    tmp_path: Path, plain_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands load the plugins that a configuration names; only our own one is trusted and used."""
    evil, canary = tmp_path / "evil", tmp_path / "canary"
    (evil / "plug").mkdir(parents=True)
    (evil / "plug.c").write_text(_PLUGIN.replace("CANARY", str(canary)))
    plugin = evil / "plug" / "auth_munge.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", plugin, evil / "plug.c"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        conf = evil / "slurm.conf"
        conf.write_text(
            f"ClusterName=evil\nAuthType=auth/munge\nPluginDir={evil}/plug\nSlurmctldHost=localhost\n"
            f"SlurmctldPort={listener.getsockname()[1]}\n"
        )
        environment = {**os.environ, "SLURM_CONF": str(conf)}
        subprocess.run(["squeue"], env=environment, capture_output=True, timeout=60, check=False)
        assert canary.exists(), "such a configuration is dangerous"
        canary.unlink()
        if os.geteuid() == 0:
            for path in (evil, *evil.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        else:
            evil.chmod(0o777)
        base = tmp_path / "tree"
        own_conf = plain_sandbox.environment()["SLURM_CONF"]
        monkeypatch.delenv("SLURM_CONF", raising=False)
        healthy = Runs(base).launch(
            "healthy", tag=TAG, job_id=_submit_job(base, own_conf), slurm_conf=own_conf
        )
        Runs(base).launch("theirs", job_id="77", slurm_conf=str(conf))
        code, out, err = run(base, "status", "--json")
        assert not canary.exists(), err
        rows = {row["run"]: row for row in json.loads(out)}
        assert rows["healthy"]["state"] in ("PENDING", "RUNNING"), healthy
        assert rows["theirs"]["state"] == "UNKNOWN" and code == 3
        assert f"SLURM_CONF={conf}, which is not trusted" in err
        for words in (*verbs_about("theirs"), ("status", "4711"), ("status", "77"), ("cancel", "theirs")):
            run(base, *words)
        assert not canary.exists()
        run(base, "cancel", "healthy")


def _submit_job(base: Path, conf: str) -> str:
    """Submit a job as the healthy run's; return its id."""
    script = base / "healthy" / "launches" / "1" / "submitted" / f"{TAG}.1_submission.sh"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/bash\nsleep 120\n")
    done = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null", script],
        env={**os.environ, "SLURM_CONF": conf}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip().partition(";")[0]
