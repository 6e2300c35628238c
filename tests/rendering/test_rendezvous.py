"""The port at which the ranks of a job meet is free on that host."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from launcher.plan import Plan
from tests.rendering.test_claims import run, write_plan

FIRST, PORTS = 20000, 12000


def listen(port: int, family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    """Take a port, as rank 0 of another job does."""
    listener = socket.socket(family)
    try:
        listener.bind(("", port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def free_number(step: int = 0) -> int:
    """Return a job id whose port is free on this host."""
    for number in range(1000 + step, 1000 + step + PORTS):
        try:
            listen(FIRST + number % PORTS).close()
        except OSError:
            continue
        return number
    pytest.fail("every port is taken")


def port_of(plan: Plan, job: int) -> int:
    code, output = run(plan, SLURM_JOB_ID=str(job))
    assert code == 0, output
    match = re.search(r"; rendezvous at n1:(\d+)$", output, re.MULTILINE)
    assert match, output
    return int(match[1])


def test_the_port_follows_from_the_job(tmp_path: Path) -> None:
    plan, job = write_plan(tmp_path, "slurm"), free_number()
    assert port_of(plan, job) == FIRST + job % PORTS


def test_tasks_of_an_array_differ_by_their_own_ids(tmp_path: Path) -> None:
    """Slurm gives each an id, beside the array's; no other job has it."""
    plan, job = write_plan(tmp_path, "slurm"), free_number()
    array = {"SLURM_ARRAY_JOB_ID": str(job - 3), "SLURM_ARRAY_TASK_ID": "3"}
    _, output = run(plan, SLURM_JOB_ID=str(job), **array)
    assert f"rendezvous at n1:{FIRST + job % PORTS}\n" in output


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_on_which_somebody_listens_is_left_alone(tmp_path: Path, family: socket.AddressFamily) -> None:
    plan, job = write_plan(tmp_path, "slurm"), free_number(step=500)
    with ExitStack() as taken:
        try:
            taken.enter_context(listen(FIRST + job % PORTS, family))
        except OSError as error:
            pytest.skip(f"no such sockets here: {error}")
        second = port_of(plan, job)
        assert second != FIRST + job % PORTS
        assert FIRST <= second < FIRST + PORTS
        # Not that of the next job, which may be about to begin on this host.
        assert second != FIRST + (job + 1) % PORTS
        # A job with the same first choice finds the second taken as well.
        taken.enter_context(listen(second))
        third = port_of(plan, job + PORTS)
        assert third not in (FIRST + job % PORTS, second)
        listen(third).close()
