"""Two sandboxes, with accounting and without, populated at the same time: most of it is waiting time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.jobs.on_slurm.sandbox_runs import SandboxRuns, open_runs
from tests.jobs.on_slurm.scenarios import populate
from tests.sandbox.fixtures import booted


@pytest.fixture(scope="session")
def sandbox_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SandboxRuns]]:
    """Runs on sandboxes of their own: what runs, waits or is broken there stays so for all of these tests."""
    with booted(accounting=True) as sandbox, booted(accounting=False) as plain_sandbox:
        runs_by_kind = {
            "accounting": open_runs(tmp_path_factory.mktemp("accounting"), sandbox),
            "plain": open_runs(tmp_path_factory.mktemp("plain"), plain_sandbox),
        }
        with ThreadPoolExecutor() as pool:
            list(pool.map(populate, runs_by_kind.values()))
        yield runs_by_kind


@pytest.fixture(params=["accounting", "plain"])
def runs(request: pytest.FixtureRequest, sandbox_runs: dict[str, SandboxRuns]) -> SandboxRuns:
    """The runs of a sandbox, with accounting and then without."""
    return sandbox_runs[request.param]
