"""Two zoos, with accounting and without, populated at the same time: most of it is waiting for Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher.sandbox import Sandbox
from tests.tracking.scenarios import populate
from tests.tracking.zoo import Zoo, open_zoo


@pytest.fixture(scope="package")
def zoos(
    sandbox: Sandbox, plain_sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Zoo]]:
    both = {
        "accounting": open_zoo(tmp_path_factory.mktemp("accounting"), sandbox),
        "plain": open_zoo(tmp_path_factory.mktemp("plain"), plain_sandbox),
    }
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(populate, both.values()))
        yield both
    finally:
        for zoo in both.values():
            zoo.cancel_all()
            zoo.command("scontrol", "update", "NodeName=n4", "State=RESUME")


@pytest.fixture(params=["accounting", "plain"])
def zoo(request: pytest.FixtureRequest, zoos: dict[str, Zoo]) -> Zoo:
    """The runs of a sandbox, with accounting and then without."""
    return zoos[request.param]
