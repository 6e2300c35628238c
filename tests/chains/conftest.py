"""A sandbox of their own for the chains, which break nodes; all at the same time: most of it is waiting."""

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

    def ended(self, run: str) -> ChainRuns:
        """Wait until a chain has been through what is done to it; fail as that failed."""
        self.over[run].result()
        return self.runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, pool: WarmPool) -> Iterator[ChainRuns]:
    """A sandbox for chains; the ranks of real trainings are forked from one that has imported torch."""
    with booted(nodes=NODES) as sandbox:
        one = open_runs(tmp_path_factory.mktemp("chains"), sandbox, pool)
        # The real trainer saves within that, on a busy machine too.
        one.slurm("scontrol", "update", "PartitionName=low", "GraceTime=20")
        yield one


@pytest.fixture(scope="session")
def chains(runs: ChainRuns) -> Iterator[Chains]:
    found = Chains(runs)
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        for run, scenario in SCENARIOS.items():
            found.over[run] = pool.submit(scenario, runs, run)
        yield found
        runs.is_closed = True
