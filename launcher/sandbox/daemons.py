"""The daemons of a sandbox: started in the order in which they need each other, each recorded at once."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import Reporter, configuration, prerequisites, state
from launcher.sandbox.configuration import CLUSTER, CONTROLLER
from launcher.sandbox.options import is_free
from launcher.sandbox.prerequisites import program, search_path, slurm_version
from launcher.sandbox.state import SandboxRecord, ask

# Marks the daemons, and through them slurmstepd, as belonging to a sandbox.
MARKER = "SLIPWAY_SANDBOX_MEMBER"
# Every daemon is ready in seconds on any machine; one that ends is noticed at once.
_PATIENCE_SECONDS = 60.0
_TAIL_LINES = 15


class StartError(UserError):
    """A daemon of the sandbox ended or never became ready."""


class DaemonStarter:
    """Starts the daemons of one sandbox."""

    def __init__(self, record: SandboxRecord, reporter: Reporter) -> None:
        self.record = record
        self.paths = record.paths
        self.reporter = reporter

    def start(
        self,
        name: str,
        command: Sequence[str],
        ready: Callable[[], bool] | None = None,
        host: str = CONTROLLER,
        mounts: Mapping[Path, Path] | None = None,
        **environment: str,
    ) -> None:
        """Start a daemon that stays in the foreground, detached from the terminal; wait until it is ready.

        No daemon depends on the machine's name, nor on whether it resolves: each sees the name `host` and the
        sandbox's hosts file. `mounts` maps further files to the paths that they replace for the daemon.
        """
        self.reporter.step(f"starting {name}")
        paths = self.paths
        seen = prerequisites.name_files(paths) | {paths.daemon_communication: paths.communication}
        words = prerequisites.enter(host, seen | dict(mounts or {}), [program(command[0]), *command[1:]])
        write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # Not subprocess: the child outlives this process, which Popen objects warn about.
        pid = os.posix_spawn(
            program("env"),
            ["env", "--chdir=/", *words],
            # None of the user's variables: a job gets them with its submission.
            {
                "PATH": search_path(),
                "SLURM_CONF": str(paths.slurm_conf),
                MARKER: str(paths.directory),
                **environment,
            },
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(paths.output(name)), write, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self.record.daemons[name] = state.child(pid)
        self.record.save()
        if ready is not None:
            self.wait(name, ready)

    def wait(self, name: str, ready: Callable[[], bool]) -> None:
        """Wait until a daemon is ready; raise StartError if it takes too long, or one of them ends."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not ready():
            for each, process in self.record.daemons.items():
                is_alive = process.is_alive  # asked first: one that ends meanwhile has an exit code then
                code = state.reap(process.pid)
                if code is not None or not is_alive:
                    raise self._failure(each, f"ended with exit code {code}" if code is not None else "ended")
            if time.monotonic() > deadline:
                raise self._failure(name, f"was not ready after {_PATIENCE_SECONDS:.0f} s")
            time.sleep(0.01)

    def _failure(self, name: str, what: str) -> StartError:
        return StartError(f"{name} {what}; {_quote_tail(self.paths.output(name))}")


def _quote_tail(log: Path) -> str:
    """Return the last lines of a log, indented, after a line that names it."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return "\n".join([f"the end of {log}:", *(f"    {line}" for line in lines or ["(empty)"])])


_USER = "root"  # who boots a sandbox


def add_accounts(starter: DaemonStarter) -> None:
    """Add the requested accounts and QOS, once slurmctld has registered with slurmdbd."""
    options, conf = starter.record.options, starter.paths.slurm_conf
    starter.reporter.step("adding accounts")
    show = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={_USER}", f"cluster={CLUSTER}")
    starter.wait("slurmctld", lambda: bool(ask(conf, *show)))
    own = sorted({*options.qos, "normal"})
    commands = [["add", "qos", name] for name in options.qos if name != "normal"]
    commands += [["add", "account", name, f"cluster={CLUSTER}"] for name in options.accounts]
    commands += [["add", "user", _USER, f"account={name}"] for name in options.accounts]
    commands += [["modify", "user", _USER, "set", f"qos={','.join(own)}", "defaultqos=normal"]]
    if options.accounts:
        commands += [["modify", "user", _USER, "set", f"defaultaccount={options.accounts[0]}"]]
    for command in commands:
        if ask(conf, "sacctmgr", "--immediate", "--quiet", *command, seconds=20) is None:
            raise StartError(f"sacctmgr {' '.join(command)} failed")
    added = {"accounts": options.accounts, "QOS": options.qos}
    starter.reporter.done("; ".join(f"{kind}: {', '.join(names)}" for kind, names in added.items() if names))


def write_files(record: SandboxRecord) -> None:
    """Write the configuration, the munge key and the device files of the fake GPUs."""
    options, paths = record.options, record.paths
    nodes = [paths.spool / name for name in options.node_names]
    for folder in (paths.etc, paths.logs, paths.run, paths.devices, paths.controller_state, *nodes):
        folder.mkdir(parents=True)
    # munged requires a folder that no other user can write to.
    paths.munge.mkdir(mode=0o755)
    _write_secret(paths.munge_key, os.urandom(1024))
    for index in range(options.gpus):
        # Slurm follows the link to a character device, which a container could not make without MKNOD. With
        # a regular file jobs run, but CUDA_VISIBLE_DEVICES is silently unset.
        (paths.devices / f"gpu{index}").symlink_to(os.devnull)
    first_job_id = configuration.choose_first_job_id(time.time())
    version = slurm_version()
    paths.slurm_conf.write_text(configuration.slurm_conf(options, record.ports, version, first_job_id))
    (paths.etc / "gres.conf").write_text(configuration.gres_conf(options))
    paths.plugstack_conf.write_text(configuration.plugstack_conf(options))
    paths.communication.write_text(configuration.CLIENT_COMMUNICATION)
    paths.daemon_communication.write_text(configuration.DAEMON_COMMUNICATION)
    (paths.etc / "cgroup.conf").write_text(configuration.cgroup_conf(version))
    prerequisites.write_name_files(options)
    if options.pyxis is not None:
        machine = prerequisites.site_configuration().read_text()
        paths.enroot_conf.write_text(configuration.enroot_conf(paths, machine))
        paths.own_containers.mkdir(parents=True)
        nodes = [paths.containers / name for name in options.node_names]
        for folder in (paths.containers, *nodes):
            folder.mkdir(exist_ok=True)
            # Enroot makes a folder for each user, as that user.
            folder.chmod(0o1777)


def start_all(starter: DaemonStarter) -> None:
    """Start every daemon and wait until all nodes are idle."""
    options = starter.record.options
    _start_munged(starter)
    if options.accounting:
        _start_accounting(starter)
    _start_controller(starter)
    if options.is_enforced:
        add_accounts(starter)
    _start_nodes(starter)


def _start_munged(starter: DaemonStarter) -> None:
    paths = starter.paths
    command = ["munged", "--foreground", "--force", "--num-threads=2"]
    command += [f"--key-file={paths.munge_key}", f"--socket={paths.munge_socket}"]
    command += [f"--pid-file={paths.run}/munged.pid", f"--log-file={paths.logs}/munged.log"]
    command += [f"--seed-file={paths.munge}/seed"]
    starter.start("munged", command, paths.munge_socket.exists)
    starter.reporter.done("munged")


def _start_accounting(starter: DaemonStarter) -> None:
    paths, port = starter.paths, starter.record.ports.slurmdbd
    _install_database(starter)
    # No port at all, and no care for a power cut: the data goes with the directory.
    command = ["mariadbd", "--no-defaults", "--user=root", f"--datadir={paths.database}"]
    command += [f"--socket={paths.database_socket}", f"--pid-file={paths.run}/mariadbd.pid"]
    command += [f"--tmpdir={paths.database_temporary}"]
    command += ["--skip-networking", "--skip-log-bin", "--innodb-flush-log-at-trx-commit=0"]
    # Values that slurmdbd asks for, where they cost no memory; its log complains about the small pool.
    command += ["--innodb-buffer-pool-size=128M", "--innodb-log-file-size=64M"]
    command += ["--innodb-lock-wait-timeout=900", f"--init-file={paths.database_setup}"]
    # slurmdbd does not support it; older versions of MariaDB have no such option (loose).
    command += ["--loose-innodb-snapshot-isolation=OFF"]
    starter.start("mariadbd", command, lambda: _greets(paths.database_socket))
    starter.reporter.done("mariadbd")

    _write_secret(paths.slurmdbd_conf, configuration.slurmdbd_conf(paths, starter.record.ports).encode())
    socket_path = str(paths.database_socket)
    starter.start("slurmdbd", ["slurmdbd", "-D"], lambda: not is_free(port), MYSQL_UNIX_PORT=socket_path)
    starter.reporter.done(f"slurmdbd on port {port}")


def _install_database(starter: DaemonStarter) -> None:
    paths = starter.paths
    starter.reporter.step("creating the database")
    output = paths.output("mariadb-install-db")
    # Without --force it ends where neither the machine's name nor "localhost" resolves.
    command = [program("mariadb-install-db"), "--no-defaults", "--user=root", "--skip-test-db", "--force"]
    command += [f"--datadir={paths.database}", "--auth-root-authentication-method=normal"]
    command += [f"--tmpdir={paths.database_temporary}"]
    for folder in (paths.database, paths.database_temporary):
        folder.mkdir(mode=0o700)
    # slurmdbd would create it after a connection that fails. MariaDB's client library 11.8.9 resets its limit
    # of columns to 0 when a connection fails, and refuses the result of every later query.
    paths.database_setup.write_text(f"CREATE DATABASE {configuration.DATABASE};\n")
    with output.open("wb") as log:
        outcome = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=120)
    if outcome.returncode:
        raise StartError(f"mariadb-install-db failed; {_quote_tail(output)}")


def _start_controller(starter: DaemonStarter) -> None:
    port, conf = starter.record.ports.slurmctld, str(starter.paths.slurm_conf)
    starter.start("slurmctld", ["slurmctld", "-D", "-f", conf], lambda: not is_free(port))
    starter.reporter.done(f"slurmctld on port {port}")


def _start_nodes(starter: DaemonStarter) -> None:
    options, paths = starter.record.options, starter.paths
    conf = paths.slurm_conf
    # Several nodes of one machine: what Enroot keeps by the names of containers must not meet.
    enroot = {paths.enroot_conf: prerequisites.site_configuration()} if options.pyxis else {}
    for name in options.node_names:
        own = {paths.containers / name: paths.own_containers} if options.pyxis else {}
        starter.start(name, ["slurmd", "-D", "-f", str(conf)], host=name, mounts=enroot | own)
    starter.reporter.step("waiting for the nodes")

    def are_nodes_idle() -> bool:
        # "idle*" is a node that has not answered yet.
        states = ask(conf, "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%t") or []
        return states.count("idle") == options.nodes

    starter.wait(options.node_names[-1], are_nodes_idle)
    starter.reporter.done(f"idle nodes: {options.nodes}, fake GPUs on each: {options.gpus}")


def _greets(path: Path) -> bool:
    """Return True if a database answers on its socket, which it does once it is ready."""
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
