"""The nodes of a job: those of its allocation, and the ones among them that its tasks run on."""

import os
import select
import subprocess
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence

from slipway.common.node import marks
from slipway.common.node.settings import ALLOCATION, LOCAL, Settings

if TYPE_CHECKING:
    from slipway.supervisor.hooks import Verdict

_SECONDS = 60
# The script asks for the hosts while Python starts: Slurm's answer is there.
HOSTS_FD = 8


class Nodes:
    """The hosts of an allocation.

    Attributes
    ----------
    hosts
        All of them, in Slurm's order: neighbours in the topology are neighbours here.
    count
        Number of hosts that the tasks need; ``None`` for all.
    left_out
        By the host that the tasks do not run on: the reason, a sentence.
    """

    def __init__(self, hosts: Sequence[str], count: Optional[int] = None) -> None:
        self.hosts, self.count = list(hosts), count
        self.left_out: Dict[str, str] = {}

    def leave_out(self, host: str, why: str) -> None:
        """Keep the tasks off a host from now on; the first reason stays."""
        self.left_out.setdefault(host, why)

    def describe_left_out(self) -> str:
        """Return the hosts that are left out, each with the reason, in one line of limited length."""
        return marks.quote("; ".join(f"{host}: {why}" for host, why in self.left_out.items()))

    def has_enough(self) -> bool:
        """Return True if the tasks can run on what is left."""
        return len(self.list_usable()) >= (self.count or len(self.hosts))

    def can_spare(self, hosts: Sequence[str]) -> bool:
        """Return True if the tasks can run without these as well."""
        return len(set(self.list_usable()) - set(hosts)) >= (self.count or len(self.hosts))

    def choose(self) -> List[str]:
        """Return the hosts for the tasks, in Slurm's order."""
        return self.list_usable()[: self.count]

    def list_usable(self) -> List[str]:
        """Return the hosts that are not left out."""
        return [host for host in self.hosts if host not in self.left_out]


class SickNodes(Exception):
    """The tasks cannot run: too few of these hosts are healthy, or the supervisor's own is sick."""

    def __init__(self, hosts: List[str], verdict: "Verdict") -> None:
        super().__init__(verdict.why)
        self.hosts, self.verdict = hosts, verdict


def find_nodes(settings: Settings) -> Nodes:
    """Return the nodes of this job.

    Raises
    ------
    OSError
        If Slurm does not name the hosts.
    """
    if settings.scheduler == LOCAL:
        return Nodes(["localhost"])
    hosts = _hosts_of_script() or _hosts(os.environ["SLURM_JOB_NODELIST"])
    # The job does not use all of its allocation.
    is_part = settings.scheduler == ALLOCATION or settings.spares
    return Nodes(hosts, settings.nodes if is_part else None)


def _hosts_of_script() -> List[str]:
    """Return the hosts that the script asked for; none where it did not, or got no answer."""
    try:
        with open(HOSTS_FD, "rb") as stream:
            answered = select.select([stream], [], [], _SECONDS)[0]
            return stream.read().decode().split() if answered else []
    except (OSError, ValueError):
        return []


def _hosts(nodelist: str) -> List[str]:
    command = ["scontrol", "show", "hostnames", nodelist]  # without the controller
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from error
    hosts = done.stdout.decode().split()
    if done.returncode or not hosts:
        raise OSError("{}: exit code {}".format(" ".join(command), done.returncode))
    return hosts
