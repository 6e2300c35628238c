"""A sandbox with Pyxis: each node has containers of its own, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from launcher.sandbox import prerequisites
from launcher.sandbox.lifecycle import Sandbox, down, up
from launcher.sandbox.options import SandboxOptions
from launcher.sandbox.state import processes, status
from tests.pyxis.conftest import run_step
from tests.sandbox.test_sandbox_real import traces, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.pyxis]


def test_containers_of_one_name_on_two_nodes_do_not_meet(on_pyxis: Sandbox, shell_image: Path) -> None:
    assert status(on_pyxis.directory).pyxis
    srun = ["srun", "--quiet", "--container-name=one", "--container-writable", "--container-remap-root"]
    write = ["sh", "-c", "hostname >/etc/written"]
    run_step([*srun, "--nodes=2", f"--container-image={shell_image}", *write])
    # The step before has left a container on each node.
    for node in ("n1", "n2"):
        assert run_step([*srun, f"--nodelist={node}", "cat", "/etc/written"]).strip() == node
        output = run_step(["srun", "--quiet", f"--nodelist={node}", "enroot", "list"])
        assert "pyxis_one" in output.split()
        file = on_pyxis.directory / "containers" / node / f"data-{os.geteuid()}/pyxis_one/etc/written"
        assert file.read_text().strip() == node


def test_enroot_of_the_machine_itself_is_not_touched(on_pyxis: Sandbox, shell_image: Path) -> None:
    before = prerequisites.site_configuration().read_text()
    run_step(["srun", "--quiet", "--container-name=apart", f"--container-image={shell_image}", "ls"])
    assert str(on_pyxis.directory) not in before
    assert "pyxis_apart" not in run_step(["enroot", "list"]).split()
    assert not list((on_pyxis.directory / "containers/own").iterdir()), "seen on the nodes alone"


def test_a_step_without_a_name_leaves_nothing(on_pyxis: Sandbox, shell_image: Path) -> None:
    command = ["srun", "--quiet", "--nodelist=n1", "enroot", "list"]
    before = run_step(command)
    run_step(["srun", "--quiet", "--nodelist=n1", f"--container-image={shell_image}", "ls"])
    assert run_step(command) == before


def test_down_removes_containers_whose_step_was_killed(
    pyxis_sandbox: Sandbox, shell_image: Path, short_directory: Path
) -> None:
    plugin = pyxis_sandbox.options.pyxis
    sandbox = up(
        SandboxOptions(directory=short_directory / "one", nodes=1, gpus=1, cloud_nodes=0, pyxis=plugin)
    )
    command = ["srun", "--quiet", "--container-name=left", f"--container-image={shell_image}"]
    command += ["env", "--ignore-environment", "sleep", "3600"]
    with subprocess.Popen(command, env=sandbox.environment(), stderr=subprocess.DEVNULL) as client:
        try:
            wait_for(lambda: _sleepers(sandbox.directory))
            (sleeper,) = _sleepers(sandbox.directory)
            os.kill(processes()[sleeper].parent, signal.SIGKILL)  # slurmstepd, which would stop the container
            wait_for(lambda: processes()[sleeper].parent == 1)
            assert down(sandbox.directory)
            assert sleeper not in processes()
        finally:
            client.kill()
    assert traces(sandbox.directory) == []
    assert not sandbox.directory.exists()


def _sleepers(directory: Path) -> list[int]:
    """Return the processes that sleep in a container of a sandbox."""
    pids = []
    for pid in processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            mounts = Path(f"/proc/{pid}/mountinfo").read_text()
        except OSError:
            continue
        if line[-3:-1] == [b"sleep", b"3600"] and line[0] == b"sleep" and f"{directory}/containers" in mounts:
            pids.append(pid)
    return pids
