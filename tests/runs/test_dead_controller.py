"""A controller that is gone: before a launch, in the middle of one, and while verbs watch a job."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.sandbox.lifecycle import Sandbox
from tests.runs.faulty_sbatch import accepted_jobs
from tests.runs.faulty_site import Site, faulty_site, outcomes, wait_until

# Nothing listens on this privileged port.
_DEAD_PORT = 9


class Controller:
    """The controller as clients see it: another port in their slurm.conf makes it unreachable.

    The sandbox serves the other tests all the while.
    """

    def __init__(self, conf: Path, real: Path) -> None:
        self.conf = conf
        # Less patience than Slurm's own ten seconds.
        self._alive = real.read_text() + "\nMessageTimeout=2\n"
        self.revive()

    def die(self) -> None:
        self._write(re.sub(r"(?m)^SlurmctldPort=.*$", f"SlurmctldPort={_DEAD_PORT}", self._alive))

    def revive(self) -> None:
        self._write(self._alive)

    def _write(self, text: str) -> None:
        whole = self.conf.with_suffix(".new")
        whole.write_text(text)
        whole.replace(self.conf)


@pytest.fixture
def site(tmp_path: Path, sandbox: Sandbox) -> Iterator[Site]:
    with faulty_site(tmp_path, sandbox) as site:
        # The job itself has the real slurm.conf; only the clients lose the controller.
        (tmp_path / "payload").write_text(
            '#!/bin/bash\n[[ $1 == -c ]] || until [[ -e "${0%/*}/go" ]]; do echo alive; sleep 0.2; done\n'
        )
        yield site


@pytest.fixture
def controller(site: Site) -> Controller:
    return Controller(site.directory / "slurm.conf", Path(site.environment["SLURM_CONF"]))


def conf_override(controller: Controller) -> str:
    return f"cluster.slurm_conf={controller.conf}"


@pytest.mark.slurm
def test_launch_fails_or_waits_while_the_controller_is_dead(site: Site, controller: Controller) -> None:
    controller.die()
    result = site.launch_all({"early": ()}, 1, conf_override(controller))["early"]
    assert result[0] == 2, result[1]
    assert "Unable to contact slurm controller" in result[1]
    assert "nothing was launched" in result[1]
    assert "Traceback" not in result[1]
    assert not (site.directory / "results").exists()
    process = site.launch("early", conf_override(controller), "cluster.partition=cloud")
    assert process.stderr is not None
    assert any("asking again" in line for line in process.stderr)
    controller.revive()
    code, out, err = outcomes(process)
    assert code == 0, out + err


@pytest.mark.slurm
def test_launch_and_watchers_survive_the_death_of_the_controller(site: Site, controller: Controller) -> None:
    """The controller has the first run's job and cannot be asked; the second run's job runs meanwhile."""
    watched = site.launch("watched", conf_override(controller))
    middle = site.launch("middle", conf_override(controller), "cluster.partition=cloud", faults=["stopping"])
    assert outcomes(watched)[0] == 0
    wait_until(lambda: site.status()["watched"]["state"] == "RUNNING")
    watchers = {verb: site.start(*verb.split(), "watched") for verb in ("follow", "logs -f")}
    wait_until(lambda: (site.faults("middle") / "stopped").exists())
    controller.die()
    try:
        (site.faults("middle") / "go").touch()
        assert middle.stderr is not None
        # Before that there is a warning: the partition starts no jobs.
        assert any("looking for the job by its tag" in line for line in middle.stderr)
        middle.send_signal(signal.SIGINT)
        assert outcomes(middle)[0] == 130
        # Each waits for the controller for a while, so they start at once.
        second = site.launch("middle", conf_override(controller))
        status_process = site.start("status", "watched")
        rows = site.status()
        assert {row["state"] for row in rows.values()} == {"UNKNOWN"}
        assert "Unable to contact slurm controller" in rows["watched"]["reason"]
        assert outcomes(status_process)[0] == 3
        code, _, err = outcomes(second)
        assert code == 2
        assert "it is not known whether launch 1 of middle became a job" in err
        assert [watcher.poll() for watcher in watchers.values()] == [None, None], "they go on"
    finally:
        controller.revive()
    states = {run: row["state"] for run, row in site.status().items()}
    assert states == {"watched": "RUNNING", "middle": "PENDING"}
    (site.directory / "go").touch()
    second = site.launch("middle", conf_override(controller))
    (job,) = accepted_jobs(site.faults("middle"))
    code, _, err = outcomes(second)
    assert (code, site.manifest("middle").job_id) == (2, job)
    assert f"launch 1 of middle was submitted as job {job} after all" in err
    for verb, watcher in watchers.items():
        code, out, err = outcomes(watcher)
        assert code == 0, (verb, out, err)
