"""The rank of this process, from the environment. Imports no torch: a user's mistake is reported first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from slipway.common.errors import UserError

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29500

# The launch, the job, and which of its attempts: the links of a chain share the first.
_NAMED_BY = ("SLIPWAY_TAG", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")


@dataclass(frozen=True)
class World:
    """The processes of this training, under torchrun's names.

    Attributes
    ----------
    rank, size
        Global number of this process, and how many there are.
    local_rank, local_size
        The same within this node.
    address, port
        Where rank 0 listens for the rendezvous.
    name
        The job's own: two trainings that come to one port do not take each other's ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    name: str = "alone"

    @property
    def is_main(self) -> bool:
        """Return whether this is the process that reports."""
        return self.rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> World:
        """Read torchrun's variables, RANK and WORLD_SIZE and the others, and the job's name.

        Raises
        ------
        UserError
            If a value is not a number, or the rank is not below the world size.
        """
        size = _number(environment, "WORLD_SIZE", 1, 1)
        rank = _number(environment, "RANK", 0, 0)
        if rank >= size:
            raise UserError(f"RANK={rank} must be smaller than WORLD_SIZE={size}")
        local_rank = _number(environment, "LOCAL_RANK", 0, 0)
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=max(_number(environment, "LOCAL_WORLD_SIZE", 1, 1), local_rank + 1),
            address=environment.get("MASTER_ADDR", DEFAULT_ADDRESS),
            port=_number(environment, "MASTER_PORT", DEFAULT_PORT, 1),
            name=".".join(environment[part] for part in _NAMED_BY if environment.get(part)) or cls.name,
        )

    def threads(self, environment: Mapping[str, str]) -> int:
        """Return this process's CPU threads: OMP_NUM_THREADS, else an equal share of the node's cores."""
        if environment.get("OMP_NUM_THREADS", "").isdigit():
            return max(1, int(environment["OMP_NUM_THREADS"]))
        return max(1, len(os.sched_getaffinity(0)) // self.local_size)


def _number(environment: Mapping[str, str], name: str, default: int, minimum: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdigit() or int(text) < minimum:
        raise UserError(
            f"environment variable {name}={text!r}: expected a whole number of at least {minimum}"
        )
    return int(text)
