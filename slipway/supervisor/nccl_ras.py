"""NCCL's own knowledge of a job: how many collectives each rank of each communicator has launched.

Each process has a RAS thread since NCCL 2.24, and the first one of a node listens to clients; JSON is there
since 2.28.7. NCCL's user guide, "Troubleshooting, RAS", has the protocol, which is text, and the format.
"""

import json
import os
import socket
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

_DEFAULT_ADDRESS = "localhost:28028"
# NCCL collects for five seconds at most.
_COMMANDS = b"CLIENT PROTOCOL 2\nTIMEOUT 5\nSET FORMAT json\nVERBOSE STATUS\n"
_SECONDS, _MOST_BYTES = 8.0, 1 << 26

# Address of a node, and id of a process there.
Member = Tuple[str, int]


class Communicator(NamedTuple):
    """Collectives that members have launched, and members of which NCCL knows nothing more."""

    launched: Dict[Member, int]
    missing: List[Member]


def ask() -> List[Communicator]:
    """Return the communicators of the job on this node; none where no NCCL answers, or an older one."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _DEFAULT_ADDRESS).rpartition(":")
    content, end = b"", time.monotonic() + _SECONDS
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1.0) as connection:
            connection.sendall(_COMMANDS)
            while len(content) < _MOST_BYTES:
                connection.settimeout(max(end - time.monotonic(), 0.01))
                chunk = connection.recv(1 << 16)
                if not chunk:
                    break
                content += chunk
        return read(json.loads(content[content.index(b"{") :].decode("utf-8", "replace")))
    except (OSError, ValueError):
        return []


def read(content: Any) -> List[Communicator]:
    """Return the communicators of NCCL's answer; none where it is not of the known form."""
    try:
        return [
            Communicator(
                {_member(rank): sum(rank["collective_counts"].values()) for rank in each["ranks"]},
                [_member(rank) for rank in each["missing_ranks"]],
            )
            for each in content["communicators"]
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def _member(rank: Dict[str, Any]) -> Member:
    return str(rank["host"]), int(rank["pid"])


def find_ranks(
    communicators: List[Communicator], processes: Dict[str, Dict[int, int]]
) -> Optional[Dict[Member, int]]:
    """Return the rank of each member, by the ranks of the processes on each host.

    NCCL names nodes by addresses: each is the host most of whose processes it has. Return ``None`` if the
    processes are another job's.
    """
    members = {member for each in communicators for member in (*each.launched, *each.missing)}
    ranks: Dict[Member, int] = {}
    for address in {address for address, _ in members}:
        own = {pid for other, pid in members if other == address}
        host = max(processes, key=lambda name: len(own & set(processes[name])), default="")
        for pid in own & set(processes.get(host, {})):
            ranks[address, pid] = processes[host][pid]
    return ranks if ranks else None
