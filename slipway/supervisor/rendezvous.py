"""The address and the port at which a job's tasks meet."""

import os
from typing import Sequence, Set, Tuple

from slipway.common.node.settings import ALLOCATION, LOCAL

# Below the ephemeral ports, which the kernel gives to anybody.
_FIRST, _PORTS = 20000, 12000
# Not the number of jobs nearby.
_STEP = 4001
_TRIES = 50
_LISTENING = "0A"


def rendezvous(scheduler: str, hosts: Sequence[str], restarts: int = 0) -> Tuple[str, int]:
    """Return the address and the port at which the tasks of these hosts meet: each time another port."""
    # Several runs may share an allocation.
    is_shared = scheduler in (LOCAL, ALLOCATION)
    number = os.getpid() if is_shared else int(os.environ["SLURM_JOB_ID"])
    return "127.0.0.1" if scheduler == LOCAL else hosts[0], free_port(number + restarts * _STEP)


def free_port(number: int) -> int:
    """Return a number's port, or the next free one of its row on this host."""
    taken = _listening()
    port = _FIRST + number % _PORTS
    for attempt in range(_TRIES):
        port = _FIRST + (number + _STEP * attempt) % _PORTS
        if port not in taken:
            break
    return port


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
