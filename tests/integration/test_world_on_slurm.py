"""The number of tasks, as the tasks of a real job see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.integration.conftest import SLIPWAY, run_command

RECORDER = """#!/bin/sh
[ "$1" = -c ] && exit
printf '%s' "$WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_RANK $SLURMD_NODENAME" >"$RECORD/$RANK"
"""


@pytest.mark.slurm
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (2, 2), (4, 1), (3, 2)])
def test_each_task_knows_the_size_of_the_job(tmp_path: Path, sandbox: Sandbox, nodes: int, gpus: int) -> None:
    record, recorder = tmp_path / "record", tmp_path / "recorder"
    record.mkdir()
    recorder.write_text(RECORDER)
    recorder.chmod(0o755)
    run_command(
        SLIPWAY,
        "launch",
        "training=gpt3/tiny",
        "cluster=sandbox",
        f"cluster.gpus_per_node={gpus}",  # the tasks follow
        f"training.trainer.num_nodes={nodes}",
        "training.model.tensor_model_parallel_size=1",
        f"training.model.global_batch_size={16 * nodes * gpus}",
        "training.model.data.data_impl=mock",
        f"cluster.python={recorder}",
        f"env_vars.RECORD={record}",
        "--follow",
        cwd=tmp_path,
        SLURM_CONF=sandbox.environment()["SLURM_CONF"],
    )
    tasks = {int(path.name): path.read_text().split() for path in record.iterdir()}
    assert sorted(tasks) == list(range(nodes * gpus))
    assert {(world, local) for world, local, _, _ in tasks.values()} == {(str(nodes * gpus), str(gpus))}
    assert [tasks[rank][2] for rank in sorted(tasks)] == [str(rank % gpus) for rank in sorted(tasks)]
    assert len({tasks[rank][3] for rank in tasks}) == nodes
