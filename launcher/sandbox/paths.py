"""Every path of a sandbox, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.sandbox import STATE_FILE, slurm_conf_path

# sockaddr_un.sun_path holds 108 bytes, the last of them a zero.
_SOCKET_PATH_LIMIT = 107


@dataclass(frozen=True, slots=True)
class SandboxPaths:
    """The files and folders under a sandbox's directory."""

    directory: Path

    @property
    def state_file(self) -> Path:
        return self.directory / STATE_FILE

    @property
    def slurm_conf(self) -> Path:
        return slurm_conf_path(self.directory)

    @property
    def etc(self) -> Path:
        return self.directory / "etc"

    @property
    def slurmdbd_conf(self) -> Path:
        return self.etc / "slurmdbd.conf"

    @property
    def hosts(self) -> Path:
        return self.etc / "hosts"

    @property
    def nsswitch(self) -> Path:
        return self.etc / "nsswitch.conf"

    @property
    def private_etc(self) -> Path:
        """A copy of the machine's /etc, for a machine whose /etc lacks a file that the daemons need."""
        return self.directory / "private-etc"

    @property
    def communication(self) -> Path:
        """Included by slurm.conf; the daemons see `daemon_communication` in its place."""
        return self.etc / "communication.conf"

    @property
    def daemon_communication(self) -> Path:
        return self.etc / "communication-of-daemons.conf"

    @property
    def devices(self) -> Path:
        return self.directory / "dev"

    @property
    def logs(self) -> Path:
        return self.directory / "log"

    @property
    def run(self) -> Path:
        return self.directory / "run"

    @property
    def controller_state(self) -> Path:
        return self.directory / "state"

    @property
    def spool(self) -> Path:
        return self.directory / "spool"

    @property
    def munge(self) -> Path:
        return self.directory / "munge"

    @property
    def munge_key(self) -> Path:
        return self.munge / "key"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def database(self) -> Path:
        return self.directory / "mysql"

    @property
    def database_temporary(self) -> Path:
        """MariaDB's own: when one starts it removes the temporary tables of any other in the same folder."""
        return self.directory / "mysql-tmp"

    @property
    def database_socket(self) -> Path:
        return self.run / "mysql.sock"

    @property
    def database_setup(self) -> Path:
        """SQL that mariadbd runs before it answers."""
        return self.etc / "database.sql"

    @property
    def containers(self) -> Path:
        """The parent of a folder for every node, and of `own_containers`."""
        return self.directory / "containers"

    @property
    def own_containers(self) -> Path:
        """The folder of Enroot and Pyxis as a node sees it: `containers_of` that node; empty elsewhere."""
        return self.containers / "own"

    def containers_of(self, node: str) -> Path:
        return self.containers / node

    @property
    def enroot_conf(self) -> Path:
        """Seen on a node in place of the machine's own."""
        return self.etc / "enroot.conf"

    @property
    def plugstack_conf(self) -> Path:
        return self.etc / "plugstack.conf"

    def output(self, daemon: str) -> Path:
        """Return the file of a daemon's standard output and error."""
        return self.logs / f"{daemon}.out"

    def check_socket_length(self, nodes: int) -> None:
        """Refuse a directory in which the paths of sockets exceed the kernel's limit.

        Raises
        ------
        UserError
            If the longest socket path, that of a job step on the last node, is too long.
        """
        node = f"n{nodes}"
        longest = self.spool / node / f"{node}_99999999.4294967295"
        excess = len(str(longest).encode()) - _SOCKET_PATH_LIMIT
        if excess > 0:
            raise UserError(
                f"the path of the sandbox is too long by {excess} characters: {self.directory}\n"
                f"  Slurm puts Unix sockets in it, such as {longest}, of at most {_SOCKET_PATH_LIMIT} bytes.",
                hint="choose a shorter one with --dir",
            )
