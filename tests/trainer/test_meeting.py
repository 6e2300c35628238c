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
    """Return when a process has a connection to what listens on a port of this host."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(
        one.raddr and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED
        for one in psutil.Process(process.pid).net_connections("tcp")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_jobs_at_one_port_do_not_meet(trainings: Any, pool: Any, tmp_path: Path) -> None:
    """The same launch in another job, such as the next link of its chain, is another job all the same."""
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


@pytest.mark.parametrize(("devices", "started"), [(2, 2), (1, 2)])
def test_as_many_nodes_as_were_started(trainings: Any, devices: int, started: int) -> None:
    changes = {"trainer.num_nodes": None, "trainer.devices": devices, "trainer.max_steps": 1}
    done = trainings(f"on_{started // devices}_nodes", changes, world=started)
    assert done.codes == [0] * started, done.stderr
    assert f"world: {started} processes on" in done.stdout[0]
