"""The text of the configuration files, the choice of ports and the paths: nothing is started."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UserError
from launcher.sandbox import configuration, default_directory, slurm_conf_path
from launcher.sandbox.options import Ports, SandboxOptions, SandboxPaths, choose_ports, is_free
from slipway.supervisor.rendezvous import _PORTS
from tests.sandbox.fixtures import write_and_read

_DIRECTORY = Path("/srv/sandbox")
_VERSION = (22, 5)


def _conf(**choices: int | bool) -> dict[str, str]:
    """Split a slurm.conf into its keys; nodes and partitions are keyed with their names."""
    options = SandboxOptions(directory=_DIRECTORY, **choices)  # type: ignore[arg-type]
    text = configuration.slurm_conf(options, Ports(17000, options.nodes), _VERSION)
    return _keys(text)


def _keys(text: str) -> dict[str, str]:
    values = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            head, _, rest = line.partition(" " if line.startswith(("Node", "Part", "Incl")) else "=")
            assert head not in values, f"twice in slurm.conf: {head}"
            values[head] = rest
    return values


def test_everything_in_slurm_conf_lies_under_the_directory() -> None:
    values = " ".join(_conf(accounting=True).values())
    paths = set(re.findall(r"(?<![\w.])/[\w./%-]+", values)) - {"/bin/true"}
    assert len(paths) >= 8
    assert all(path.startswith("/srv/sandbox/") for path in paths)


def test_nodes_have_consecutive_ports_and_the_requested_resources() -> None:
    conf = _conf(nodes=3, gpus=2, cpus=16)
    assert conf["SlurmctldPort"] == "17000"
    assert conf["NodeName=n[1-3]"].startswith("NodeAddr=127.0.0.1 Port=[17002-17004] CPUs=16")
    assert "Gres=gpu:2" in conf["NodeName=n[1-3]"]
    assert {"PartitionName=gpu", "PartitionName=low", "PartitionName=high"} <= conf.keys()


def test_one_node_is_not_written_as_a_range() -> None:
    conf = _conf(nodes=1, gpus=1)
    assert "Port=17002 " in conf["NodeName=n1"]
    gres = configuration.gres_conf(SandboxOptions(directory=_DIRECTORY, nodes=1, gpus=1, cloud_nodes=0))
    assert gres == "NodeName=n1 Name=gpu File=/srv/sandbox/dev/gpu0\n"


def test_cloud_nodes_have_gpu_files_too() -> None:
    # Without these files slurmctld warns once for each of a thousand nodes since 24.11.
    lines = configuration.gres_conf(SandboxOptions(directory=_DIRECTORY, gpus=2)).splitlines()
    assert lines[1] == "NodeName=cloud[0001-1024] Name=gpu File=/srv/sandbox/dev/gpu[0-1]"


# A slurm.conf has only the options that its version documents.
@pytest.mark.parametrize(
    ("version", "keys"),
    [
        ((22, 5), {"SlurmctldParameters", "PrivateData", "requeue_setup_env_fail"}),
        ((24, 11), {"PreemptParameters", "requeue_setup_env_fail"}),
        ((26, 5), {"PreemptParameters"}),
    ],
)
def test_options_are_those_of_the_version(version: tuple[int, int], keys: set[str]) -> None:
    options = SandboxOptions(directory=_DIRECTORY)
    conf = _keys(configuration.slurm_conf(options, Ports(17000, options.nodes), version))
    words = conf.keys() | set(conf["SchedulerParameters"].split(","))
    version_options = {"SlurmctldParameters", "PrivateData", "PreemptParameters", "requeue_setup_env_fail"}
    assert words & version_options == keys


@pytest.mark.parametrize(
    ("version", "plugin"),
    [((22, 5), "cgroup/v1"), ((23, 11), "cgroup/v1"), ((24, 5), "disabled"), ((26, 5), "disabled")],
)
def test_control_groups_are_disabled(version: tuple[int, int], plugin: str) -> None:
    assert configuration.cgroup_conf(version) == f"CgroupPlugin={plugin}\n"


def test_nobody_can_run_on_cloud_nodes() -> None:
    conf = _conf()
    assert conf["NodeName=cloud[0001-1024]"].endswith("State=CLOUD")
    assert conf["PartitionName=cloud"].endswith("State=DOWN")
    assert conf["SuspendTime"] == "INFINITE"


def test_no_cloud_without_cloud_nodes() -> None:
    conf = _conf(cloud_nodes=0)
    assert not any("cloud" in key or key.startswith(("Suspend", "Resume")) for key in conf)


def test_accounting_uses_the_private_munge() -> None:
    assert "AccountingStoragePass" not in _conf()
    conf = _conf(accounting=True)
    assert conf["AccountingStoragePass"] == "/srv/sandbox/munge/socket"
    assert conf["AuthInfo"] == "socket=/srv/sandbox/munge/socket"


def test_the_database_has_no_port() -> None:
    text = configuration.slurmdbd_conf(SandboxPaths(_DIRECTORY), Ports(17000, 4))
    assert "StorageHost=localhost\n" in text
    assert "StoragePort" not in text
    assert "DbdPort=17001\n" in text


def test_hosts_names_the_nodes_and_the_hosts_of_the_machine() -> None:
    machine = ["127.0.1.1 login # the machine", "10.0.0.7 n1 storage", "# nothing", "", "::1 ip6-localhost"]
    lines = configuration.hosts(SandboxOptions(directory=_DIRECTORY, nodes=2), "box", machine).splitlines()
    assert lines == [
        "127.0.0.1 localhost",
        "127.0.0.1 n1 n2 controller box",
        "127.0.1.1 login",
        "10.0.0.7 storage",
        "::1 ip6-localhost",
    ]


@pytest.mark.parametrize(
    ("name", "names"), [("box.example.org", "box.example.org box"), ("n1", ""), ("controller", "")]
)
def test_the_machine_is_on_loopback_by_both_its_names(name: str, names: str) -> None:
    options = SandboxOptions(directory=_DIRECTORY, nodes=1)
    lines = configuration.hosts(options, name, ["10.9.9.9 box box.example.org printer"]).splitlines()
    assert lines[1] == f"127.0.0.1 n1 controller {names}".rstrip()
    assert ("10.9.9.9 printer" in lines) == bool(names)


@pytest.mark.parametrize(
    ("machine", "line"),
    [
        ([], "hosts: files dns"),
        (["hosts:          files dns"], "hosts: files dns"),
        (["hosts: dns # none"], "hosts: files dns"),
        (
            ["hosts: mymachines resolve [!UNAVAIL=return] files myhostname dns"],
            "hosts: files mymachines resolve [!UNAVAIL=return] myhostname dns",
        ),
        (["hosts: mdns4 files [NOTFOUND=return SUCCESS=return] dns"], "hosts: files mdns4 dns"),
        (["hosts: dnsfiles files"], "hosts: files dnsfiles"),
    ],
)
def test_the_hosts_file_is_asked_first(machine: list[str], line: str) -> None:
    lines = configuration.nsswitch(["passwd: files sss", *machine, "services: files"]).splitlines()
    assert lines == ["passwd: files sss", "services: files", line]


def test_cloud_names_grow() -> None:
    assert configuration.cloud_names(12) == "cloud[0001-0012]"
    assert configuration.cloud_names(12000) == "cloud[00001-12000]"


def test_ports_stay_where_they_were_and_avoid_taken_ones() -> None:
    options = SandboxOptions(directory=_DIRECTORY)
    first = choose_ports(options)
    assert choose_ports(options) == first
    with socket.socket() as server:
        server.bind(("127.0.0.1", first.slurmd[-1]))
        server.listen()
        assert not is_free(first.slurmd[-1])
        second = choose_ports(options)
        assert set(range(second.base, second.slurmd.stop)).isdisjoint(range(first.base, first.slurmd.stop))
        with pytest.raises(UserError, match=f"port {first.slurmd[-1]} is taken"):
            choose_ports(SandboxOptions(directory=_DIRECTORY, base_port=first.base))


def test_ports_of_one_sandbox_do_not_meet() -> None:
    ports = Ports(20000, 4)
    assert len({ports.slurmctld, ports.slurmdbd, *ports.slurmd}) == 6


@pytest.mark.parametrize("base", [80, 65535])
def test_base_port_must_leave_room(base: int) -> None:
    with pytest.raises(UserError, match=f"--base-port {base}: expected 1024 to"):
        choose_ports(SandboxOptions(directory=_DIRECTORY, base_port=base))


def test_a_directory_may_be_as_long_as_its_sockets_allow() -> None:
    longest = 107 - len("/spool/n4/n4_99999999.4294967295")
    SandboxPaths(Path("/" + "d" * (longest - 1))).check_socket_length(nodes=4)
    with pytest.raises(UserError, match="too long by 1 characters"):
        SandboxPaths(Path("/" + "d" * longest)).check_socket_length(nodes=4)
    with pytest.raises(UserError, match="n100_"):
        SandboxPaths(Path("/" + "d" * (longest - 1))).check_socket_length(nodes=100)


@pytest.mark.parametrize("directory", ["/srv/my sandbox", "/srv/a,b", "/srv/n[1-4]", "/srv/a#b", "/srv/a\nb"])
def test_a_directory_that_slurm_conf_cannot_name_is_refused(directory: str) -> None:
    with pytest.raises(UserError, match="cannot live in"):
        SandboxOptions(directory=Path(directory))


def test_sizes_are_checked() -> None:
    with pytest.raises(UserError, match="--nodes 0: expected 1 to 256"):
        SandboxOptions(directory=_DIRECTORY, nodes=0)
    with pytest.raises(UserError, match="--cloud-nodes -1"):
        SandboxOptions(directory=_DIRECTORY, cloud_nodes=-1)


def test_options_survive_the_record(tmp_path: Path) -> None:
    options = SandboxOptions(directory=tmp_path, nodes=2, accounting=True, base_port=20000)
    assert write_and_read(options) == options


def test_gpus_may_have_a_type() -> None:
    options = SandboxOptions(directory=_DIRECTORY, gpus=2, gpu_type="a100", accounting=True)
    text = configuration.slurm_conf(options, Ports(17000, options.nodes), _VERSION)
    assert "Gres=gpu:a100:2 " in text
    assert "AccountingStorageTRES=gres/gpu,gres/gpu:a100\n" in text
    assert configuration.gres_conf(options).startswith("NodeName=n[1-4] Name=gpu Type=a100 File=")


def test_accounts_and_qos_are_enforced_where_there_are_any() -> None:
    for accounting in (True, False):
        assert "AccountingStorageEnforce" not in _conf(accounting=accounting)
    for choice in ({"accounts": ("research",)}, {"qos": ("debug",)}):
        conf = _conf(accounting=True, **choice)  # type: ignore[arg-type]
        assert conf["AccountingStorageEnforce"] == "associations,limits,qos"
        with pytest.raises(UserError, match="needs a database of accounts"):
            _conf(**choice)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "choice",
    [{"gpu_type": "A 100"}, {"accounts": ("a,b",), "accounting": True}, {"qos": ("",), "accounting": True}],
)
def test_names_that_slurm_would_read_otherwise_are_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="expected lower-case letters"):
        SandboxOptions(directory=_DIRECTORY, **choice)


def test_further_options_survive_the_record_too(tmp_path: Path) -> None:
    options = SandboxOptions(
        directory=tmp_path, accounting=True, gpu_type="h100", accounts=("a", "b"), qos=("debug",)
    )
    assert write_and_read(options) == options
    plain = SandboxOptions(directory=tmp_path)
    assert write_and_read(plain, lacking="qos") == plain
    assert options.differences(SandboxOptions(directory=tmp_path, accounting=True)) == [
        "gpu type h100, requested none",
        "accounts a,b, requested none",
        "qos debug, requested none",
    ]


def test_differences_are_named() -> None:
    running = SandboxOptions(directory=_DIRECTORY, base_port=20000)
    assert running.differences(SandboxOptions(directory=_DIRECTORY)) == []
    requested = SandboxOptions(directory=_DIRECTORY, nodes=2, accounting=True, base_port=21000)
    assert running.differences(requested) == [
        "nodes 4, requested 2",
        "accounting off, requested on",
        "base port 20000, requested 21000",
    ]


def test_the_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_SANDBOX_DIR", "/srv/mine")
    assert slurm_conf_path(default_directory()) == Path("/srv/mine/etc/slurm.conf")
    monkeypatch.delenv("SLIPWAY_SANDBOX_DIR")
    assert default_directory() == Path("/var/lib/slipway/sandbox")


def test_asking_for_the_directory_loads_nothing_else() -> None:
    program = (
        "import sys; from launcher.sandbox import default_directory; default_directory()\n"
        "print([name for name in sys.modules if name.startswith('launcher.sandbox.') or name in "
        "('subprocess', 'socket', 'json', 'dataclasses', 'rich')])"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert outcome.stdout.strip() == "[]", outcome.stderr


def test_each_boot_begins_at_another_job_number() -> None:
    earlier, later = (configuration.choose_first_job_id(now) for now in (1_795_000_000.0, 1_795_000_060.0))
    assert 0 < earlier < later < 67_043_328, "Slurm's MaxJobId"


def test_sixty_jobs_of_sandboxes_that_boot_within_half_a_minute_have_ports_of_their_own() -> None:
    first, *others = (
        configuration.choose_first_job_id(1_795_000_000 + quarter / 4) for quarter in range(120)
    )
    ports = {(first + job) % _PORTS for job in range(60)}
    assert ports.isdisjoint((other + job) % _PORTS for other in others for job in range(60))
