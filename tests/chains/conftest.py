"""The sandbox of the chains, which break nodes; all chains run at once, since most of it is waiting."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.chains.chain_runs import NODES, ChainRuns, open_runs
from tests.chains.chain_scenarios import SCENARIOS
from tests.sandbox.fixtures import booted
from tests.warm import WarmPool


@dataclass
class Chains:
    """The chains, each under way or over."""

    runs: ChainRuns
    over: dict[str, Future[object]] = field(default_factory=dict)

    def wait_for(self, run: str) -> ChainRuns:
        """Wait until a chain's scenario is over; fail as that failed."""
        self.over[run].result()
        return self.runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, pool: WarmPool) -> Iterator[ChainRuns]:
    """Yield a sandbox for chains; the ranks of real trainings are forked from a process with torch."""
    with booted(nodes=NODES) as sandbox:
        runs = open_runs(tmp_path_factory.mktemp("chains"), sandbox, pool)
        # The real trainer saves within this time, on a busy machine too.
        runs.slurm("scontrol", "update", "PartitionName=low", "GraceTime=20")
        yield runs


@pytest.fixture(scope="session")
def chains(runs: ChainRuns) -> Iterator[Chains]:
    chains = Chains(runs)
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        for run, scenario in SCENARIOS.items():
            chains.over[run] = pool.submit(scenario, runs, run)
        yield chains
        runs.is_closed = True
