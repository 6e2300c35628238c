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
# NCCL's own limit for the collection, and in all.
_COLLECT_SECONDS, _SECONDS = 5, 8.0
_MOST_BYTES = 1 << 26

# Address of a node, and id of a process there.
Member = Tuple[str, int]


class Communicator(NamedTuple):
    """Collectives that members have launched, and members of which NCCL knows nothing more."""

    launched: Dict[Member, int]
    missing: List[Member]


def ask() -> List[Communicator]:
    """Return the communicators of the job on this node; none where no NCCL answers, or an older one."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _DEFAULT_ADDRESS).rpartition(":")
    end = time.monotonic() + _SECONDS
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 1.0) as connection:
            connection.settimeout(1.0)
            with connection.makefile("rwb") as stream:
                for line in ("CLIENT PROTOCOL 2", f"TIMEOUT {_COLLECT_SECONDS}", "SET FORMAT json"):
                    stream.write(line.encode() + b"\n")
                    stream.flush()
                    if stream.readline(200).startswith(b"ERROR"):
                        return []
                stream.write(b"VERBOSE STATUS\n")
                stream.flush()
                content = b""
                while len(content) < _MOST_BYTES and time.monotonic() < end:
                    connection.settimeout(max(end - time.monotonic(), 0.1))
                    chunk = stream.read1(1 << 16)
                    if not chunk:
                        break
                    content += chunk
        return read(json.loads(content.decode("utf-8", "replace")))
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
