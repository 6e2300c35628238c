"""Two trainings that come to one port of one host: neither takes the other's ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainer.conftest import environment, free_port
from tests.warm import WarmProcess

pytestmark = [pytest.mark.trainer, pytest.mark.timeout(300)]

PATIENCE_SECONDS = 60


def wait_until_connected(process: WarmProcess, port: int) -> None:
    """Wait until a process has a connection to a listener on a port of this host."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(
        connection.raddr and connection.raddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in psutil.Process(process.pid).net_connections("tcp")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_jobs_at_one_port_do_not_meet(trainings: Any, pool: Any, tmp_path: Path) -> None:
    """One launch in another job, such as the next link of its chain, counts as another job too."""
    port = free_port()

    def start(job: str, rank: int) -> WarmProcess:
        options, _ = trainings.configure(f"at_one_port_{job}", {"trainer.max_steps": 2}, 2)
        names = {**environment(rank, 2, port), "SLIPWAY_TAG": "one", "SLURM_JOB_ID": job}
        return pool.start(options, names, tmp_path / f"{job}.{rank}")

    first = [start("17", 0)]
    wait_until_connected(first[0], port)
    stranger = start("12017", 1)
    wait_until_connected(stranger, port)
    # Its own rank 0 finds the port taken, which ends a job of Slurm's.
    assert start("12017", 0).wait() == 1
    assert "EADDRINUSE" in (tmp_path / "12017.0").read_text()
    first.append(start("17", 1))
    assert [rank.wait() for rank in first] == [0, 0], (tmp_path / "17.0").read_text()
    assert "step 2/2" in (tmp_path / "17.0").read_text()
    assert stranger.wait() == 1
    assert "step" not in (tmp_path / "12017.1").read_text()


@pytest.mark.parametrize(("devices", "processes"), [(2, 2), (1, 2)])
def test_number_of_nodes_follows_from_the_started_processes(
    trainings: Any, devices: int, processes: int
) -> None:
    changes = {"trainer.num_nodes": None, "trainer.devices": devices, "trainer.max_steps": 1}
    outcome = trainings(f"on_{processes // devices}_nodes", changes, world=processes)
    assert outcome.codes == [0] * processes, outcome.stderr
    assert f"world: {processes} processes on" in outcome.stdout[0]
