"""The hosts of a job, and the address and the port at which its tasks meet."""

import os
import select
import subprocess
from typing import List, NamedTuple, Optional, Set

# Below the ephemeral ports, which the kernel gives to anybody.
_FIRST, _PORTS = 20000, 12000
# Not the number of jobs nearby.
_STEP = 4001
_TRIES = 50
_LISTENING = "0A"
_SECONDS = 60
# The script asks for the hosts while Python starts: Slurm's answer is there.
HOSTS_FD = 8


class Rendezvous(NamedTuple):
    """The hosts in Slurm's order, and where the tasks meet."""

    hosts: List[str]
    address: str
    port: int


def rendezvous(scheduler: str, nodes: Optional[int]) -> Rendezvous:
    """Return where the tasks meet.

    Parameters
    ----------
    nodes
        Number of hosts, where the job does not use all of its allocation.

    Raises
    ------
    OSError
        If Slurm does not name the hosts.
    """
    if scheduler == "local":
        return Rendezvous(["localhost"], "127.0.0.1", free_port(os.getpid()))
    hosts = (_hosts_of_script() or _hosts(os.environ["SLURM_JOB_NODELIST"]))[:nodes]
    # Several runs may share an allocation.
    number = os.getpid() if scheduler == "allocation" else int(os.environ["SLURM_JOB_ID"])
    return Rendezvous(hosts, hosts[0], free_port(number))


def free_port(number: int) -> int:
    """Return a number's port, or the next free one of its row on this host."""
    taken = _listening()
    port = _FIRST + number % _PORTS
    for attempt in range(_TRIES):
        port = _FIRST + (number + _STEP * attempt) % _PORTS
        if port not in taken:
            break
    return port


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


def _listening() -> Set[int]:
    ports: Set[int] = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as stream:
                for line in stream:
                    fields = line.split(None, 4)
                    if len(fields) > 3 and fields[3] == _LISTENING:
                        ports.add(int(fields[1].rpartition(":")[2], 16))
        except OSError:
            pass
    return ports
