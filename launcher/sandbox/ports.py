"""Free ports on loopback, so that several sandboxes live side by side."""

from __future__ import annotations

import socket
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Self

from launcher.errors import UserError
from launcher.sandbox.options import Options

# Below the ports that the kernel hands to outgoing connections (from 32768), which come and go.
_FIRST, _LAST = 17000, 32000


@dataclass(frozen=True, slots=True)
class Ports:
    """A block of consecutive ports: slurmctld, slurmdbd (kept even when unused), one per node."""

    base: int
    nodes: int

    @property
    def slurmctld(self) -> int:
        return self.base

    @property
    def slurmdbd(self) -> int:
        return self.base + 1

    @property
    def slurmd(self) -> range:
        return range(self.base + 2, self.base + 2 + self.nodes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        return cls(**record)


def choose_ports(options: Options) -> Ports:
    """Find a block of free ports, or check the one that was asked for.

    The search starts at a place derived from the directory: a sandbox tends to get its old ports back, and
    two that start at the same moment do not look at the same ones.

    Raises
    ------
    UserError
        When a port of the block that was asked for is taken, or when no block is free.
    """
    size = options.nodes + 2
    if options.base_port is not None:
        _check_block(options.base_port, size)
        return Ports(options.base_port, options.nodes)
    slots = (_LAST - _FIRST) // size
    first = zlib.crc32(bytes(options.directory)) % slots
    for slot in range(slots):
        base = _FIRST + (first + slot) % slots * size
        if all(is_free(port) for port in range(base, base + size)):
            return Ports(base, options.nodes)
    raise UserError(f"no {size} consecutive free ports between {_FIRST} and {_LAST}")


def _check_block(base: int, size: int) -> None:
    if not 1024 <= base <= 65536 - size:
        raise UserError(f"--base-port {base}: expected 1024 to {65536 - size}, for {size} ports in a row")
    taken = [port for port in range(base, base + size) if not is_free(port)]
    if taken:
        raise UserError(
            f"--base-port {base}: port {taken[0]} is taken; the sandbox needs {base} to {base + size - 1}",
            hint="leave --base-port out to get free ones",
        )


def is_free(port: int) -> bool:
    """Whether a daemon could listen on a port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Slurm does: connections that linger after a close are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
