"""`cluster=interactive` in the allocation of a real salloc, and on this machine without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

RECORDER = """#!/bin/sh
ranks="$RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_RANK"
printf '%s' "$SLURMD_NODENAME $ranks $SLURM_JOB_NAME $MASTER_ADDR" >"$RECORD/$RANK"
"""


@pytest.fixture
def launch(tmp_path: Path) -> list[str | Path]:
    (tmp_path / "record").mkdir()
    recorder = tmp_path / "recorder"
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    chosen = [f"cluster.python={recorder}", f"env_vars.RECORD={tmp_path / 'record'}", "training=gpt3/tiny"]
    chosen.append("training.model.data.data_impl=mock")
    return [SLIPWAY, "launch", "cluster=interactive", *chosen, "--follow"]


def recorded_texts(tmp_path: Path) -> list[str]:
    return sorted(path.read_text() for path in (tmp_path / "record").iterdir())


@pytest.mark.slurm
def test_tasks_run_on_the_nodes_of_the_allocation(
    tmp_path: Path, sandbox: Sandbox, launch: list[str | Path]
) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    salloc = ["salloc", "--quiet", "--nodes=3", "--ntasks-per-node=2"]
    done = run_command(*salloc, *launch, cwd=tmp_path, **conf)
    assert "in this allocation" in done.stdout
    assert "COMPLETED" in done.stdout
    records = [line.split() for line in recorded_texts(tmp_path)]
    first, second = sorted({node for node, *_ in records})
    assert [words[1:] for words in sorted(records, key=lambda words: words[1])] == [
        [rank, "4", "2", local, "nemo-megatron-gpt3_tiny", first]
        for rank, local in (("0", "0"), ("1", "1"), ("2", "0"), ("3", "1"))
    ]
    assert first != second
    (row,) = json.loads(run_command(SLIPWAY, "status", "--json", cwd=tmp_path, **conf).stdout)
    assert (row["state"], row["node_list"]) == ("COMPLETED", f"{first},{second}")


@pytest.mark.slurm
def test_two_runs_share_an_allocation(tmp_path: Path, sandbox: Sandbox, launch: list[str | Path]) -> None:
    """Both run at the same time, each with a rendezvous of its own: each waits until both have begun."""
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    recorder = tmp_path / "recorder"
    meet = 'touch "$RECORD/$RUN"; until [ -e "$RECORD/a" ] && [ -e "$RECORD/b" ]; do sleep 0.1; done\n'
    recorder.write_text(f'#!/bin/sh\n{meet}printf "%s" "$MASTER_PORT" >"$RECORD/$RUN.$RANK"\n')
    launch_line = '"$@" env_vars.RUN={0} training.run.name={0} &'
    script = f"{launch_line.format('a')} {launch_line.format('b')} wait -n && wait -n"
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "bash", "-c", script, "bash"]
    run_command(*salloc, *launch, cwd=tmp_path, **conf)
    ports = {
        name: {(tmp_path / "record" / f"{name}.{rank}").read_text() for rank in range(4)} for name in "ab"
    }
    assert len(ports["a"]) == len(ports["b"]) == 1
    assert ports["a"] != ports["b"]


@pytest.mark.slurm
def test_an_allocation_that_is_too_small_is_refused(
    tmp_path: Path, sandbox: Sandbox, launch: list[str | Path]
) -> None:
    conf = {"SLURM_CONF": sandbox.environment()["SLURM_CONF"]}
    done = run_command("salloc", "--quiet", "--nodes=1", *launch, cwd=tmp_path, check=2, **conf)
    assert "num_nodes=2: the allocation that this shell is in has 1" in done.stderr
    assert "salloc --nodes=2 --ntasks-per-node=2" in done.stderr
    assert not (tmp_path / "results").exists()


def test_tasks_run_on_this_machine_without_an_allocation(
    tmp_path: Path, launch: list[str | Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "on this machine" in run_command(*launch, cwd=tmp_path).stdout
    assert [line.split()[0] for line in recorded_texts(tmp_path)] == ["0", "1", "2", "3"]
    chosen = ["cluster.scheduler=allocation", "training.run.name=other"]
    done = run_command(*launch, *chosen, cwd=tmp_path, check=2)
    assert "this shell is in no allocation" in done.stderr
