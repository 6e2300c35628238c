"""Real sandboxes: booted, used, broken, and gone without a trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.sandbox import configuration, daemons, state
from launcher.sandbox.lifecycle import Sandbox, down, up
from launcher.sandbox.options import SandboxOptions
from launcher.sandbox.state import environment, load, processes, status
from tests.sandbox.fixtures import skip_without_slurm

pytestmark = pytest.mark.slurm


def call(sandbox: Sandbox, *command: str, code: int = 0) -> str:
    """Run a command of Slurm on a sandbox and return what it printed."""
    outcome = subprocess.run(
        command, env=sandbox.environment(), capture_output=True, text=True, timeout=240, cwd="/tmp"
    )
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    return outcome.stdout + outcome.stderr


def traces(directory: Path) -> list[str]:
    """Return processes that use or mount a directory, in whatever namespace they are."""
    entries = []
    for pid in processes():
        try:
            line = (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            mounts = (Path("/proc") / str(pid) / "mountinfo").read_text()
        except OSError:
            continue
        if str(directory) in line + mounts or str(directory) in environment(pid).values():
            entries.append(f"{pid} {line}")
    return entries


def wait_for(condition: Callable[[], object], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_steps_run_on_hosts_with_names_and_gpus_of_their_own(plain_sandbox: Sandbox) -> None:
    script = 'echo "$(hostname) $(getent hosts n1 | cut -d" " -f1) $CUDA_VISIBLE_DEVICES"'
    printed = call(
        plain_sandbox, "srun", "--quiet", "--nodelist=n1,n2", "--gpus-per-node=2", "sh", "-c", script
    )
    assert sorted(printed.splitlines()) == ["n1 127.0.0.1 0,1", "n2 127.0.0.1 0,1"]


def test_every_task_gets_a_gpu(plain_sandbox: Sandbox) -> None:
    printed = call(
        plain_sandbox,
        *(
            "srun",
            "--quiet",
            "--nodelist=n1,n2",
            "--ntasks-per-node=8",
            "--gpus-per-task=1",
            "--exclusive",
            "--mem=0",
        ),
        *("sh", "-c", 'echo "$(hostname) $CUDA_VISIBLE_DEVICES"'),
    )
    assert sorted(printed.splitlines()) == [f"n{node} {gpu}" for node in (1, 2) for gpu in range(8)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/bash\nsrun hostname\n")
    return path


@pytest.mark.parametrize(("nodes", "gpus", "code"), [(128, 8, 0), (1000, 8, 0), (2000, 8, 1), (2, 9, 1)])
def test_scripts_for_clusters_that_do_not_exist_are_judged(
    plain_sandbox: Sandbox, script: Path, nodes: int, gpus: int, code: int
) -> None:
    command = ["sbatch", "--test-only", "--partition=cloud", f"--nodes={nodes}", "--ntasks-per-node=8"]
    command += [f"--gpus-per-node={gpus}", "--exclusive", "--mem=0", "--time=1-00:00:00", str(script)]
    printed = call(plain_sandbox, *command, code=code)
    assert ("to start at" in printed) == (code == 0)


def test_nothing_starts_on_cloud_nodes(plain_sandbox: Sandbox, script: Path) -> None:
    job = call(plain_sandbox, "sbatch", "--parsable", "--partition=cloud", str(script)).strip()
    wait_for(lambda: "PartitionDown" in call(plain_sandbox, "squeue", "--noheader", f"--jobs={job}"))
    call(plain_sandbox, "scancel", job)


def test_a_finished_job_is_in_the_accounting(accounting_sandbox: Sandbox) -> None:
    call(accounting_sandbox, "srun", "--nodes=2", "--job-name=counted", "true")
    question = ["sacct", "--noheader", "--parsable2", "--allocations", "--name=counted"]
    question += ["--format=State,NNodes,Cluster,Account"]
    wait_for(lambda: call(accounting_sandbox, *question).strip())
    wait_for(lambda: call(accounting_sandbox, *question).startswith("COMPLETED|2|sandbox|root"))


def test_sandboxes_do_not_share_temporary_tables(accounting_sandbox: Sandbox) -> None:
    """A starting MariaDB removes tables of the others: of sandboxes booted at once some failed."""
    record = load(accounting_sandbox.directory)
    assert record is not None
    command = Path(f"/proc/{record.daemons['mariadbd'].pid}/cmdline").read_text().split("\0")
    (folder,) = (Path(word.partition("=")[2]) for word in command if word.startswith("--tmpdir="))
    assert folder.is_relative_to(accounting_sandbox.directory)


def test_daemons_listen_on_loopback_only(accounting_sandbox: Sandbox) -> None:
    ports = accounting_sandbox.ports
    own_ports = {f"{port:04X}" for port in range(ports.base, ports.slurmd.stop)}
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    listening = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    addresses = {port: address for address, port in listening if port in own_ports}
    assert addresses == dict.fromkeys(own_ports, "0100007F")


def test_two_sandboxes_live_side_by_side_and_up_is_idempotent(
    plain_sandbox: Sandbox, short_directory: Path
) -> None:
    options = SandboxOptions(directory=short_directory / "second", nodes=1, gpus=2, cloud_nodes=0)
    second = up(options)
    try:
        assert not second.was_up
        assert up(options).was_up
        with pytest.raises(UserError, match="nodes 1, requested 3"):
            up(SandboxOptions(directory=options.directory, nodes=3, gpus=2, cloud_nodes=0))
        printed = call(second, "sinfo", "--noheader", "--format=%P %D")
        assert printed.splitlines() == ["gpu* 1", "low 1", "high 1"]
        assert call(plain_sandbox, "sinfo", "--noheader", "--partition=gpu", "--format=%D").strip() == "4"
    finally:
        assert down(options.directory)
    assert status(plain_sandbox.directory).is_up


# Ignores every polite signal, and leaves processes that nothing but their namespace ties to the job.
_STUBBORN = """\
#!/bin/bash
trap '' TERM
(setsid env --ignore-environment sleep 3600 &)
srun --nodes=2 bash -c 'trap "" TERM; sleep 3600; sleep 3600'
"""


def _run_stubborn_job(sandbox: Sandbox, folder: Path) -> None:
    script = folder / "stubborn.sh"
    script.write_text(_STUBBORN)
    call(sandbox, "sbatch", "--nodes=2", "--output=/dev/null", str(script))
    wait_for(lambda: len([line for line in traces(sandbox.directory) if "sleep 3600" in line]) >= 3)


def test_down_leaves_nothing(short_directory: Path) -> None:
    skip_without_slurm()
    mounts = Path("/proc/self/mountinfo").read_text()
    sandbox = up(SandboxOptions(directory=short_directory / "sandbox", nodes=2))
    _run_stubborn_job(sandbox, short_directory)
    # A shell with the sandbox's SLURM_CONF belongs to the user, not to the sandbox.
    with subprocess.Popen(["sleep", "60"], env=sandbox.environment()) as bystander:
        assert down(sandbox.directory)
        assert bystander.poll() is None
        bystander.kill()
    assert traces(sandbox.directory) == []
    assert not sandbox.directory.exists()
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not down(sandbox.directory)


def test_remains_of_a_crash_are_cleared_away(short_directory: Path) -> None:
    skip_without_slurm()
    options = SandboxOptions(directory=short_directory / "sandbox", nodes=2)
    sandbox = up(options)
    _run_stubborn_job(sandbox, short_directory)
    before = set(traces(sandbox.directory))
    record = json.loads((options.directory / "sandbox.json").read_text())
    os.kill(record["daemons"]["slurmctld"]["pid"], signal.SIGKILL)
    wait_for(lambda: (loaded := load(options.directory)) and loaded.missing)
    broken = status(options.directory)
    assert (broken.phase, broken.missing) == ("broken", ("slurmctld",))
    try:
        assert not up(options).was_up
        assert status(options.directory).is_up
        assert before.isdisjoint(traces(options.directory))
        assert call(sandbox, "srun", "--nodes=2", "hostname").split() != []
    finally:
        down(options.directory)


def test_a_recorded_pid_that_another_process_has_now_is_not_killed(short_directory: Path) -> None:
    skip_without_slurm()
    options = SandboxOptions(directory=short_directory / "sandbox", nodes=1)
    up(options)
    record_file = options.directory / "sandbox.json"
    record = json.loads(record_file.read_text())
    with subprocess.Popen(["sleep", "60"]) as bystander:
        record["daemons"]["reused"] = {"pid": bystander.pid, "start_time": 1}
        record_file.write_text(json.dumps(record))
        assert down(options.directory)
        assert bystander.poll() is None
        bystander.kill()


def test_a_daemon_that_does_not_start_is_shown_and_nothing_stays(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_slurm()
    wrong = configuration._SLURM_CONF + "NoSuchKey=1\n"
    monkeypatch.setattr(configuration, "_SLURM_CONF", wrong)
    collect = state.reap

    def reap(pid: int) -> int | None:
        """Answer that slurmctld runs at the last moment at which that is true."""
        code = collect(pid)
        if code is None and Path(f"/proc/{pid}/comm").read_text() == "slurmctld\n":
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return code

    monkeypatch.setattr(state, "reap", reap)
    options = SandboxOptions(directory=short_directory / "sandbox")
    with pytest.raises(UserError, match="slurmctld ended with exit code 1") as error:
        up(options)
    assert "unrecognized key: NoSuchKey" in str(error.value)
    assert traces(options.directory) == []
    assert status(options.directory).phase == "failed"
    monkeypatch.undo()
    assert not up(options).was_up
    assert down(options.directory)


def test_an_interrupted_start_leaves_nothing(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_slurm()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(daemons, "_start_nodes", interrupt)
    directory = short_directory / "sandbox"
    with pytest.raises(KeyboardInterrupt):
        up(SandboxOptions(directory=directory))
    assert traces(directory) == []
    assert not directory.exists()


def test_a_full_directory_is_refused(short_directory: Path) -> None:
    skip_without_slurm()
    (short_directory / "precious").write_text("mine")
    with pytest.raises(UserError, match="not a sandbox"):
        up(SandboxOptions(directory=short_directory))
    assert [path.name for path in short_directory.iterdir()] == ["precious"]
