"""Real sandboxes on machines whose name, name service files and root directory differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sandbox.fixtures import skip_without_slurm

pytestmark = pytest.mark.slurm

_NAMESPACES = ("unshare", "--uts", "--mount", "--propagation", "private")
_INSTALLER = """\
127.0.0.1	localhost
127.0.1.1	box.example.org	box

# The following lines are desirable for IPv6 capable hosts
::1     localhost ip6-localhost ip6-loopback
ff02::1 ip6-allnodes
ff02::2 ip6-allrouters
"""
# A machine: a host name, and an /etc of its own, without a name server. $2 is an empty directory.
_MACHINE = """
set -e
hostname "$1"
mount -t tmpfs machine "$2"
mkdir "$2/etc" "$2/root"
cp --archive /etc/. "$2/etc"
mount --bind "$2/etc" /etc
ln --symbolic --force /dev/null /etc/resolv.conf
cd /etc
eval "$3"
"""
# Mounts are shared, as on a machine that systemd has booted: a mount that leaves a namespace is seen.
_RUN = """
shift 3
mount --make-rshared /
exec "$@"
"""
# A root directory that is no mount point, with the content of the machine's.
_RUN_IN_CHROOT = """
cd "$2/root"
shift 3
for path in /*; do
    if [ -L "$path" ]; then
        cp --no-dereference "$path" .
    elif [ -d "$path" ]; then
        mkdir ".$path"
        mount --rbind "$path" ".$path"
    fi
done
mount --make-rshared /
exec chroot . "$@"
"""
_SESSION = """
import subprocess, time
from pathlib import Path
from tests.sandbox.fixtures import booted

def call(*command):
    outcome = subprocess.run(command, env=sandbox.environment(), capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout

def states():
    return call("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobName,State").split()

before = Path("/proc/self/mountinfo").read_text()
with booted(nodes=2, accounting=True) as sandbox:
    output = sandbox.directory / "job.out"
    call("sbatch", "--nodes=2", f"--output={output}", "--job-name=batch", "--wrap=srun hostname")
    print(*sorted(call("srun", "--nodes=2", "--job-name=step", "hostname").split()))
    deadline = time.monotonic() + 60
    while sorted(states()) != ["batch|COMPLETED", "step|COMPLETED"]:
        assert time.monotonic() < deadline, states()
        time.sleep(0.1)
    print(*sorted(output.read_text().split()))
    assert Path("/proc/self/mountinfo").read_text() == before
"""


def use_sandbox(repository: Path, machine: Path, name: str, setup: str, run: str = _RUN) -> list[str]:
    """Boot and use a sandbox on a machine of its own; return the hosts of an srun and of a batch job."""
    skip_without_slurm(accounting=True)
    if subprocess.run([*_NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("the root directory is no mount point, and mounts would leave the namespace")
    outcome = subprocess.run(
        [
            *_NAMESPACES,
            *("sh", "-c", _MACHINE + run, "machine", name, str(machine), setup),
            *("env", f"--chdir={repository}", sys.executable, "-c", _SESSION),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "setup"),
    [
        pytest.param("box", f"printf %s '{_INSTALLER}' > hosts", id="installer"),
        pytest.param("box.example.org", "echo 127.0.0.1 localhost > hosts", id="unknown-name"),
        pytest.param("box", "echo 192.0.2.1 box > hosts", id="wrong-address"),
        pytest.param("box", ": > hosts", id="empty"),
        pytest.param("box", "rm -f hosts", id="no-hosts"),
        pytest.param("box", "ln -sf /nowhere hosts; rm -f nsswitch.conf", id="dangling-link-no-nsswitch"),
        pytest.param("box", "echo 'hosts: dns' > nsswitch.conf", id="only-dns"),
    ],
)
def test_jobs_run_whatever_the_name_of_the_machine_resolves_to(
    repository: Path, tmp_path: Path, name: str, setup: str
) -> None:
    assert use_sandbox(repository, tmp_path, name, setup) == ["n1 n2", "n1 n2"]


def test_jobs_run_in_a_chroot_whose_root_is_no_mount_point(repository: Path, tmp_path: Path) -> None:
    assert use_sandbox(repository, tmp_path, "box", "rm -f hosts", _RUN_IN_CHROOT) == ["n1 n2", "n1 n2"]
