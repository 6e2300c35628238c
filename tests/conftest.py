"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.zygotes", "tests.forked_slipway", "tests.sandbox.fixtures", "tests.warm"]

REPOSITORY = Path(__file__).resolve().parents[1]

# No example fails for being slow: how fast a machine is proves nothing. All else stays as hypothesis has it.
settings.register_profile(
    "any machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A signal that `nohup` or a background shell ignores would be ignored by every process of the tests.
# Python itself ignores these two, and gives them back to what it starts.
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
for number in signal.valid_signals() - _OF_PYTHON:
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# Where this is set, as in images of containers, each start of `slipway` would compile the launcher anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden scripts anew")
    parser.addoption(
        "--accounting",
        choices=("on", "off"),
        help="boot every sandbox with accounting, or every one without, unless a test is about that",
    )


# Their set-up is costly, and all files of a group share it. They begin first: they mostly wait for Slurm.
_TOGETHER = {
    "tests/chains/": ("tests/chains/",),
    "sandbox_runs": tuple(
        f"tests/jobs/on_slurm/test_{name}_on_slurm.py" for name in ("acting", "arrays", "forgotten", "states")
    ),
}
# They take more than a minute each: while the last one ends, the other workers have nothing to do.
_LONG = (
    "tests/integration/test_readme.py",
    "tests/benchmarks/test_soak.py",
    "tests/trainer/test_continuation.py",
    "tests/integration/test_first_launch.py",
    "tests/runs/test_killed_launchers.py",
    "tests/sweeps/test_sweep_on_slurm.py",
    "tests/supervisor/test_every_python.py",
    "tests/benchmarks/test_gpu_check.py",
    "tests/trainer/test_resharding.py",
)
# Tests of many seconds, left out of the inner loop: those with one of these fixtures, and the files below.
_SLOW_FIXTURES = {"sandbox", "plain_sandbox", "accounting_sandbox", "no_accounting_sandbox", "pool"}
_SLOW = (
    "tests/benchmarks/test_gpu_step.py",
    "tests/cli/test_broken_outputs.py",
    "tests/cli/mistakes/",
    "tests/config/test_many.py",
    *(
        f"tests/corpus/test_{name}.py"
        for name in ("bombs", "cleaned_preparation", "faults", "kills", "losses")
    ),
    "tests/corpus/test_preparation.py",
    "tests/corpus/test_torture.py",
    "tests/config/test_secrets.py",
    "tests/integration/test_loopback_alone.py",
    "tests/integration/test_replay.py",
    "tests/launching/test_earlier_training.py",
    "tests/monitor/test_hostile_runs.py",
    "tests/packaging/",
    "tests/rendering/test_quoting.py",
    "tests/resilience/",
    "tests/runs/test_settling.py",
    "tests/supervisor/test_every_python.py",
    "tests/jobs/test_finding.py",
)
for name in (*sum(_TOGETHER.values(), ()), *_LONG, *_SLOW):
    assert (REPOSITORY / name).exists(), f"{name}, which tests/conftest.py names, has moved"


def _is_slow(item: pytest.Item) -> bool:
    needs_slow = not _SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    return needs_slow or item.get_closest_marker("slurm") is not None or item.nodeid.startswith(_SLOW)


def _group(nodeid: str) -> str:
    """Return the group of tests that one worker runs: a file, or files that share costly fixtures."""
    file = nodeid.partition("::")[0]
    return next((name for name, files in _TOGETHER.items() if file.startswith(files)), file)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {group: place for place, group in enumerate((*_TOGETHER, *_LONG))}
    items.sort(key=lambda item: order.get(_group(item.nodeid), len(order)))
    for item in items:
        if _is_slow(item):
            item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a group together and in their order with several workers (``-n 3``)."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def other_user(tmp_path: Path) -> int:
    """Let every user enter `tmp_path`; return the id of one."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 == 0o005:
            break  # the directory for temporary files, which everybody may enter
        path.chmod(0o755)
    return 65534


_CACHES = count()


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the index of runs away from the user's own."""
    directory = tmp_path_factory.mktemp("caches")
    before = os.environ.get("SLIPWAY_CACHE_DIR")
    os.environ["SLIPWAY_CACHE_DIR"] = str(directory / "session")
    yield directory
    if before is None:
        del os.environ["SLIPWAY_CACHE_DIR"]
    else:
        os.environ["SLIPWAY_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def cache_dir(caches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test an index of its own; the directory is made when something is remembered."""
    directory = caches / str(next(_CACHES))
    monkeypatch.setenv("SLIPWAY_CACHE_DIR", str(directory))
    monkeypatch.delenv("SLIPWAY_RESULTS_DIR", raising=False)
    return directory
