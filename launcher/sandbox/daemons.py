"""The daemons of a sandbox, in the order in which they need each other."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

from launcher.sandbox import configuration, containers, namespaces
from launcher.sandbox.accounts import add_accounts
from launcher.sandbox.clients import ask
from launcher.sandbox.ports import is_free
from launcher.sandbox.prerequisites import program, slurm_version
from launcher.sandbox.state import State
from launcher.sandbox.supervision import StartError, Supervisor, tail


def write_files(state: State) -> None:
    """Write the configuration, the key and what stands for the GPUs."""
    options, layout = state.options, state.layout
    nodes = [layout.spool / name for name in options.node_names]
    for folder in (layout.etc, layout.logs, layout.run, layout.devices, layout.controller_state, *nodes):
        folder.mkdir(parents=True)
    # munged insists on a folder that nobody else can write to.
    layout.munge.mkdir(mode=0o755)
    _write_secret(layout.munge_key, os.urandom(1024))
    for index in range(options.gpus):
        # Slurm follows the link to a character device, which a container could not make without MKNOD. With
        # a regular file jobs run, but CUDA_VISIBLE_DEVICES is silently unset.
        (layout.devices / f"gpu{index}").symlink_to(os.devnull)
    first_job_id = configuration.first_job_id(time.time())
    version = slurm_version()
    layout.slurm_conf.write_text(configuration.slurm_conf(options, state.ports, version, first_job_id))
    (layout.etc / "gres.conf").write_text(configuration.gres_conf(options))
    layout.plugstack_conf.write_text(configuration.plugstack_conf(options))
    clients, daemons = configuration.communication_conf()
    layout.communication.write_text(clients)
    layout.daemon_communication.write_text(daemons)
    (layout.etc / "cgroup.conf").write_text(configuration.cgroup_conf(version))
    namespaces.write_name_files(options)
    if options.pyxis is not None:
        machine = containers.site_configuration().read_text()
        layout.enroot_conf.write_text(configuration.enroot_conf(layout, machine))
        layout.own_containers.mkdir(parents=True)
        nodes = [layout.containers_of(name) for name in options.node_names]
        for folder in (layout.containers, *nodes):
            folder.mkdir(exist_ok=True)
            # Enroot makes a folder for each user, as that user.
            folder.chmod(0o1777)


def start_all(supervisor: Supervisor) -> None:
    """Start every daemon and wait until all nodes are idle."""
    state = supervisor.state
    _start_munged(supervisor)
    if state.options.accounting:
        _start_accounting(supervisor)
    _start_controller(supervisor)
    if state.options.is_enforced:
        add_accounts(supervisor)
    _start_nodes(supervisor)


def _start_munged(supervisor: Supervisor) -> None:
    layout = supervisor.layout
    command = ["munged", "--foreground", "--force", "--num-threads=2"]
    command += [f"--key-file={layout.munge_key}", f"--socket={layout.munge_socket}"]
    command += [f"--pid-file={layout.run}/munged.pid", f"--log-file={layout.logs}/munged.log"]
    command += [f"--seed-file={layout.munge}/seed"]
    supervisor.start("munged", command)
    supervisor.wait("munged", layout.munge_socket.exists)
    supervisor.reporter.done("munged")


def _start_accounting(supervisor: Supervisor) -> None:
    layout, port = supervisor.layout, supervisor.state.ports.slurmdbd
    _install_database(supervisor)
    # No port at all, and no care for a power cut: the data goes with the directory.
    command = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={layout.database}"]
    command += [f"--socket={layout.database_socket}", f"--pid-file={layout.run}/mariadbd.pid"]
    command += [f"--tmpdir={layout.database_temporary}"]
    command += ["--skip-networking", "--skip-log-bin", "--innodb-flush-log-at-trx-commit=0"]
    # What slurmdbd asks for, where it does not cost memory; it grumbles about the small pool in its log.
    command += ["--innodb-buffer-pool-size=128M", "--innodb-log-file-size=64M"]
    command += ["--innodb-lock-wait-timeout=900", f"--init-file={layout.database_setup}"]
    # slurmdbd does not support it; older versions of MariaDB have no such option (loose).
    command += ["--loose-innodb-snapshot-isolation=OFF"]
    supervisor.start("mariadbd", command)
    supervisor.wait("mariadbd", lambda: _greets(layout.database_socket))
    supervisor.reporter.done("mariadbd")

    _write_secret(layout.slurmdbd_conf, configuration.slurmdbd_conf(layout, supervisor.state.ports).encode())
    supervisor.start("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(layout.database_socket))
    supervisor.wait("slurmdbd", lambda: not is_free(port))
    supervisor.reporter.done(f"slurmdbd on port {port}")


def _install_database(supervisor: Supervisor) -> None:
    layout = supervisor.layout
    supervisor.reporter.step("creating the database")
    output = layout.output("mariadb-install-db")
    # Without --force it ends where neither the machine's name nor "localhost" resolves.
    command = [program("mariadb-install-db"), "--no-defaults", "--user=root", "--skip-test-db", "--force"]
    command += [f"--datadir={layout.database}", "--auth-root-authentication-method=normal"]
    command += [f"--tmpdir={layout.database_temporary}"]
    for folder in (layout.database, layout.database_temporary):
        folder.mkdir(mode=0o700)
    # slurmdbd would create it after a connection that fails. MariaDB's client library 11.8.9 resets its limit
    # of columns to 0 when a connection fails, and refuses the result of every later query.
    layout.database_setup.write_text(f"CREATE DATABASE {configuration.DATABASE};\n")
    with output.open("wb") as log:
        outcome = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120)
    if outcome.returncode:
        raise StartError(f"mariadb-install-db failed; the end of {output}:\n{tail(output)}")


def _start_controller(supervisor: Supervisor) -> None:
    port = supervisor.state.ports.slurmctld
    conf = str(supervisor.layout.slurm_conf)
    supervisor.start("slurmctld", ["slurmctld", "-D", "-f", conf])
    supervisor.wait("slurmctld", lambda: not is_free(port))
    supervisor.reporter.done(f"slurmctld on port {port}")


def _start_nodes(supervisor: Supervisor) -> None:
    options, layout = supervisor.state.options, supervisor.layout
    conf = layout.slurm_conf
    # Several nodes of one machine: what Enroot keeps by the names of containers must not meet.
    enroot = {layout.enroot_conf: containers.site_configuration()} if options.pyxis else {}
    for name in options.node_names:
        own = {layout.containers_of(name): layout.own_containers} if options.pyxis else {}
        supervisor.start(name, ["slurmd", "-D", "-f", str(conf)], host=name, mounts=enroot | own)
    supervisor.reporter.step("waiting for the nodes")
    supervisor.wait(options.node_names[-1], lambda: _idle_nodes(conf) == options.nodes)
    supervisor.reporter.done(f"idle nodes: {options.nodes}, fake GPUs on each: {options.gpus}")


def _idle_nodes(conf: Path) -> int:
    # "idle*" is a node that has not answered yet.
    lines = ask(conf, "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%t") or []
    return lines.count("idle")


def _greets(path: Path) -> bool:
    """Whether a database answers on its socket; it does so when it is ready, not before."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
            return bool(probe.recv(1))
        except OSError:
            return False


def _write_secret(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
