"""A sandbox of their own for the chains, which break nodes; all at the same time: most of it is waiting."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.chains.chain_scenarios import SCENARIOS
from tests.chains.chain_yard import NODES, Yard, open_yard
from tests.sandbox.fixtures import booted
from tests.warm import WarmPool


@dataclass
class Chains:
    """The chains, each under way or over."""

    yard: Yard
    over: dict[str, Future[object]] = field(default_factory=dict)

    def ended(self, run: str) -> Yard:
        """Wait until a chain has been through what is done to it; fail as that failed."""
        self.over[run].result()
        return self.yard


@pytest.fixture(scope="session")
def yard(tmp_path_factory: pytest.TempPathFactory, pool: WarmPool) -> Iterator[Yard]:
    """A sandbox for chains; the ranks of real trainings are forked from one that has imported torch."""
    with booted(nodes=NODES) as sandbox:
        one = open_yard(tmp_path_factory.mktemp("chains"), sandbox, pool)
        # The real trainer saves within that, on a busy machine too.
        one.slurm("scontrol", "update", "PartitionName=low", "GraceTime=20")
        yield one


@pytest.fixture(scope="session")
def chains(yard: Yard) -> Iterator[Chains]:
    found = Chains(yard)
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        for run, scenario in SCENARIOS.items():
            found.over[run] = pool.submit(scenario, yard, run)
        yield found
        yard.is_closed = True
